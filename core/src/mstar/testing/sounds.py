"""Sounds for tests of what hears: made by formula, so that nobody's recording is needed."""

from __future__ import annotations

import numpy as np

__all__ = ["vowel"]

_FORMANTS = (700, 1220, 2600)


def vowel(seconds: float, pitch: float = 120.0, rate: int = 16_000) -> np.ndarray:
    """A voice that says ah: overtones as a throat's resonances let them through, swelling four times a second.

    Voice detectors take it for speech. float32 ``[samples]`` with a peak of 0.3.
    """
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.03 * np.sin(2 * np.pi * 3 * time))) / rate
    sound = np.zeros_like(time)
    for number in range(1, int(4000 / pitch)):
        loud = sum(1 / (1 + ((number * pitch - formant) / 90) ** 2) for formant in _FORMANTS)
        sound += (loud + 0.02) / number * np.sin(number * phase)
    sound *= 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time)
    return np.asarray(0.3 * sound / np.abs(sound).max(), np.float32)
