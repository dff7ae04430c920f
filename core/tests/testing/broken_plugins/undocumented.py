"""Adds models that its README does not name, though a word that begins like the second one is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broken_plugins.defects import SOUND
from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [replace(SOUND, key="wallflower"), replace(SOUND, key="leak")]
