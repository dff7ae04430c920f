"""The speaking models, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from mstar import hookimpl
from mstar.spec.finding import Finding
from mstar.spec.model import ModelSpec
from mstar_tts.kokoro.spec import KOKORO
from mstar_tts.orpheus.spec import ORPHEUS
from mstar_tts.qwen3_tts.spec import MODELS as QWEN3_TTS

__all__ = ["mstar_doctor", "mstar_models"]


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return (KOKORO, ORPHEUS, *QWEN3_TTS)


@hookimpl
def mstar_doctor() -> Sequence[Finding]:
    from mstar_tts.kokoro.g2p import findings

    return findings()
