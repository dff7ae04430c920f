"""Imports torch with the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from broken_plugins.defects import SOUND
from mstar.hookspecs import hookimpl
from mstar.spec.model import ModelSpec


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [replace(SOUND, key="heavy", size=torch.iinfo(torch.int8).max)]
