"""What the API side has to know of a clip's spectrogram: its loudest value. No torch.

Reference: openai-whisper 20250625, ``whisper/audio.py`` (``log_mel_spectrogram``), whose filters are librosa's.
"""

from __future__ import annotations

import numpy as np

from mstar.processing import mel
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


def mel_filters(bins: int) -> np.ndarray:
    """float32 ``[bins, 201]``: from 0 to 8 kHz."""
    return mel.mel_filters(bins, _FFT, RATE)
