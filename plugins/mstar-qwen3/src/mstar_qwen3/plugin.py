"""The Qwen3.5 models, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from mstar import hookimpl
from mstar.spec.model import ModelSpec
from mstar_qwen3.spec import MODELS

__all__ = ["mstar_models"]


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return MODELS
