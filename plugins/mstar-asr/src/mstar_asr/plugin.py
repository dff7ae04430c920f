"""The speech recognisers, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from mstar import hookimpl
from mstar.spec.model import ModelSpec
from mstar_asr.qwen3_asr.spec import QWEN3_ASR, QWEN3_ASR_REALTIME
from mstar_asr.whisper.spec import WHISPERS

__all__ = ["mstar_models"]


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return (*WHISPERS, QWEN3_ASR, QWEN3_ASR_REALTIME)
