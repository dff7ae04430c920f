"""Fourteen tiny models, one for each shape that the core must carry (design §4).

Each is a few dozen lines on the public interfaces alone, and its right answer can be computed in closed form. Register
them with ``MSTAR_EXTRA_PLUGINS=mstar.testing.miniatures``, then ``mstar serve mini_chat``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec
from mstar.testing.miniatures.catalog import MINIATURES
from mstar.testing.miniatures.common import Example, Miniature

__all__ = ["MINIATURES", "Example", "Miniature", "miniature", "mstar_models"]


def miniature(key: str) -> Miniature:
    return next(m for m in MINIATURES if m.key == key)


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [m.spec for m in MINIATURES]
