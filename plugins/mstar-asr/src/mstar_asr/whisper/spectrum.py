"""What the API side has to know of a clip's spectrogram: its loudest value. No torch.

Reference: openai-whisper 20250625, ``whisper/audio.py`` (``log_mel_spectrogram``), whose filters are librosa's
(``librosa.filters.mel``: Slaney's scale, each filter of the same area).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from mstar_asr.whisper.request import HOP, RATE

__all__ = ["loudest", "mel_filters"]

_FFT = 400
_LEAST = 1e-10
_AT_ONCE = 4096
"""Frames that are transformed together: 41 s, some 20 MB."""


def loudest(samples: np.ndarray, bins: int) -> float:
    """The greatest log10-mel value of a clip that 30 s of silence follow.

    :param samples: float32 ``[samples]`` at 16 kHz. :param bins: 80 or 128.
    """
    half = _FFT // 2
    padded = np.pad(np.asarray(samples, np.float32), (0, _FFT))
    padded = np.concatenate([padded[half:0:-1], padded])
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::HOP]
    window = np.hanning(_FFT + 1)[:-1].astype(np.float32)
    filters = mel_filters(bins).T
    most = _LEAST
    for first in range(0, len(frames), _AT_ONCE):
        power = np.abs(np.fft.rfft(frames[first : first + _AT_ONCE] * window)) ** 2
        most = max(most, float((power.astype(np.float32) @ filters).max()))
    return float(np.log10(most))


@cache
def mel_filters(bins: int) -> np.ndarray:
    """float32 ``[bins, 201]``: from 0 to 8 kHz."""
    edges = _hertz(np.linspace(0.0, float(_mel(np.array(RATE / 2))), bins + 2))
    lines = np.linspace(0.0, RATE / 2, _FFT // 2 + 1)
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
