"""Samples as the bytes of files: PCM and WAV."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np

__all__ = ["channels", "pcm16", "wav"]


def pcm16(samples: Any) -> bytes:
    """float32 ``[samples]`` or ``[samples, channels]`` in -1…1 → signed 16-bit little-endian, interleaved."""
    scaled = np.nan_to_num(np.clip(np.asarray(samples, np.float32), -1.0, 1.0)) * 32767.0
    return bytes(np.rint(scaled).astype("<i2").tobytes())


def channels(samples: Any) -> int:
    """Of ``[samples]`` or ``[samples, channels]``."""
    return 1 if samples.ndim == 1 else int(samples.shape[1])


def wav(samples: Any, rate: int) -> bytes:
    """A complete 16-bit WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels(samples))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm16(samples))
    return out.getvalue()
