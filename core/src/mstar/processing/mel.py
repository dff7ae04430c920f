"""Mel filters: which lines of a spectrum make up each band of a spectrogram. No torch."""

from __future__ import annotations

from functools import cache

import numpy as np

__all__ = ["mel_filters"]


@cache
def mel_filters(bins: int, fft: int, rate: int, top: float | None = None) -> np.ndarray:
    """librosa's (``librosa.filters.mel``): triangles on Slaney's scale, each of the same area.

    :param fft: samples of a window. :param rate: samples a second. :param top: Hz where the last band ends; default:
        half the rate.
    :returns: float32 ``[bins, fft // 2 + 1]``.
    """
    edges = _hertz(np.linspace(0.0, float(_mel(np.array(rate / 2 if top is None else top))), bins + 2))
    lines = np.linspace(0.0, rate / 2, fft // 2 + 1)
    up = (lines - edges[:-2, None]) / np.diff(edges)[:-1, None]
    down = (edges[2:, None] - lines) / np.diff(edges)[1:, None]
    area = 2.0 / (edges[2:] - edges[:-2])
    return np.asarray(np.maximum(0.0, np.minimum(up, down)) * area[:, None], np.float32)


_LINEAR_HZ, _STEP_HZ = 1000.0, 200.0 / 3
_LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: np.ndarray) -> np.ndarray:
    """Slaney's scale: linear up to 1 kHz, logarithmic above."""
    above = np.log(np.maximum(hertz, _LINEAR_HZ) / _LINEAR_HZ) / _LOG_STEP
    return np.where(hertz >= _LINEAR_HZ, _LINEAR_HZ / _STEP_HZ + above, hertz / _STEP_HZ)


def _hertz(mel: np.ndarray) -> np.ndarray:
    border = _LINEAR_HZ / _STEP_HZ
    return np.where(mel >= border, _LINEAR_HZ * np.exp(_LOG_STEP * (mel - border)), mel * _STEP_HZ)
