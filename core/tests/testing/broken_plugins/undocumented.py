"""Adds a model that its README does not name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broken_plugins.defects import SOUND
from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [replace(SOUND, key="wallflower")]
