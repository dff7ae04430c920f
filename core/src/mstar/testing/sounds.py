"""Sounds for tests of what hears: made by formula, so that nobody's recording is needed."""

from __future__ import annotations

import numpy as np

__all__ = ["babble"]

_VOWELS = ((700, 1220, 2600), (300, 2300, 3000), (320, 800, 2250), (500, 1900, 2500), (450, 850, 2400))
"""Resonances of a throat that says a, i, u, e, o, in Hz."""


def babble(seconds: float, seed: int = 0, rate: int = 16_000) -> np.ndarray:
    """A voice that says nothing: syllables that glide from vowel to vowel after a hiss, some with a pause behind them.

    Voice detectors take it for speech from the beginning to the end. float32 ``[samples]`` with a peak of 0.3.
    """
    draw = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    made = 0
    while made < seconds * rate:
        parts += [draw.normal(size=int(draw.uniform(0.02, 0.08) * rate)) * 0.05, _syllable(draw, rate)]
        if draw.random() < 0.3:
            parts.append(np.zeros(int(draw.uniform(0.05, 0.4) * rate)))
        made = sum(map(len, parts))
    return np.concatenate(parts)[: int(seconds * rate)].astype(np.float32)


def _syllable(draw: np.random.Generator, rate: int) -> np.ndarray:
    time = np.arange(int(draw.uniform(0.12, 0.35) * rate)) / rate
    done = np.linspace(0, 1, len(time))
    pitch = draw.uniform(95, 150)
    swing = np.sin(2 * np.pi * draw.uniform(0.5, 2) * time + draw.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.15 * swing)) / rate
    before, after = (_VOWELS[draw.integers(len(_VOWELS))] for _ in range(2))
    sound = np.zeros_like(time)
    for number in range(1, int(4000 / pitch)):
        loud = sum(
            1 / (1 + ((number * pitch - (1 - done) * first - done * then) / 90) ** 2)
            for first, then in zip(before, after, strict=True)
        )
        sound += (loud + 0.02) / number**0.7 * np.sin(number * phase)
    sound *= np.sqrt(np.sin(np.pi * done))
    return np.asarray(0.3 * sound / np.abs(sound).max())
