"""Tiny models, at least one for each of the fourteen shapes that the core must carry.

Each is a few dozen lines on the public interfaces alone, and its right answer can be computed in closed form. Register
them with ``MSTAR_EXTRA_PLUGINS=mstar.testing.miniatures``, then ``mstar serve mini_chat``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec
from mstar.testing.examples import Example
from mstar.testing.miniatures.catalog import MINIATURES
from mstar.testing.miniatures.common import Miniature

__all__ = ["MINIATURES", "Example", "Miniature", "draw", "miniature", "mstar_models"]


def miniature(key: str) -> Miniature:
    return next(m for m in MINIATURES if m.key == key)


def draw(key: str, rng: random.Random) -> Example:
    """A request to miniature *key*, for :attr:`mstar.spec.model.ModelSpec.examples`."""
    mini = miniature(key)
    return replace(mini.example(rng), tolerance=mini.tolerance or 1e-5)


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [m.spec for m in MINIATURES]
