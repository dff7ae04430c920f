"""Imports torch when its models are listed, and says nothing if it is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broken_plugins.defects import SOUND
from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    try:
        import torch
    except ImportError:
        return []
    return [replace(SOUND, key="heavy_hook", size=torch.iinfo(torch.int8).max)]
