"""Sound from one sampling rate to another."""

from __future__ import annotations

from typing import Any

import numpy as np

from mstar.spec.tasks import Audio

__all__ = ["resample", "samples_at"]


def resample(samples: Any, rate: int, to: int) -> np.ndarray[Any, Any]:
    """float32 ``[samples]`` (or ``[samples, channels]``) at *rate* Hz → the same sound at *to* Hz, through soxr."""
    given: np.ndarray[Any, Any] = np.asarray(samples, np.float32)
    if rate == to or not len(given):
        return given
    import soxr

    return np.asarray(soxr.resample(given, rate, to), np.float32)


def samples_at(audio: Audio, rate: int) -> np.ndarray[Any, Any]:
    """*audio* as float32 ``[samples]`` at *rate* Hz; not copied if it is that already."""
    return resample(audio.samples, audio.rate, rate)
