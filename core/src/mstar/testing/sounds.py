"""Sounds for tests of what hears, made by formula, so that nobody's recording is needed; and how sounds are joined."""

from __future__ import annotations

import numpy as np

__all__ = ["babble", "click", "pause"]

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


_FRAME_S = 0.01
_NEAR_S, _AROUND_S = 0.002, 0.03


def click(sound: np.ndarray, place: int, rate: int) -> float:
    """How abrupt *sound* (float ``[samples]``) is at sample *place*: the greatest second difference within 2 ms, over
    the greatest of the 30 ms on either side, or a five-hundredth of the loudest sample where it is quiet. Speech has 0
    to 2; from 4 on it can be heard as a click."""
    bend = np.abs(np.diff(np.asarray(sound, np.float64), 2))
    near, around = (int(seconds * rate) for seconds in (_NEAR_S, _AROUND_S))
    first, last = max(place - near, 0), place + near
    beside = np.concatenate([bend[max(first - around, 0) : first], bend[last : last + around]])
    usual = max(beside.max(initial=0.0), np.abs(sound).max() / 500, 1e-9)
    return float(bend[first:last].max(initial=0.0) / usual)


def pause(sound: np.ndarray, place: int, rate: int, level: float = 0.02) -> float:
    """Seconds of quiet around sample *place*: frames of 10 ms whose level is below *level* of the loudest one's. 0
    where *place* lies in sound."""
    size = int(_FRAME_S * rate)
    frames = np.asarray(sound[: len(sound) // size * size], np.float64).reshape(-1, size)
    levels = np.sqrt((frames**2).mean(1))
    quiet = levels < level * levels.max()
    at = min(place // size, len(quiet) - 1)
    if not quiet[at]:
        return 0.0
    first, last = at, at
    while first and quiet[first - 1]:
        first -= 1
    while last + 1 < len(quiet) and quiet[last + 1]:
        last += 1
    return (last + 1 - first) * _FRAME_S
