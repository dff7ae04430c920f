"""Speech that arrives in pieces is what it would be in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstar.processing.resampling import resample
from mstar.processing.speech.live import LiveSound
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, Text


def tone(rate: int, seconds: float = 1.0) -> np.ndarray[Any, Any]:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100])
@pytest.mark.parametrize("piece", [1_000, 4_801])
def test_no_seam_is_heard(rate: int, piece: int) -> None:
    intake, samples = LiveSound("audio", 16_000, 60), tone(rate)
    pushes = [intake.push("audio", Audio(samples[at : at + piece], rate), "r") for at in range(0, len(samples), piece)]
    pushes.append(intake.push("audio", None, "r", end=True))
    assert [push.end for push in pushes] == [False] * (len(pushes) - 1) + [True]
    heard = np.concatenate([push.data for push in pushes if push.data is not None])
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, resample(samples, rate, 16_000), atol=1e-4)


def test_numbers_are_samples_of_the_models_rate() -> None:
    push = LiveSound("audio", 16_000, 60).push("audio", [0, 0.5, -3, float("nan")], "r", end=True)
    assert push.data.tolist() == [0, 0.5, -1, 0]
    assert (push.id, push.stream, push.end) == ("r", "audio", True)


def test_other_streams_take_arrays() -> None:
    array = np.arange(3)
    assert LiveSound("audio", 16_000, 60).push("state", array, "r").data is array


@pytest.mark.parametrize(
    ("stream", "part", "word"),
    [
        ("audio", Text("hello"), "takes sound, not text"),
        ("state", Text("hello"), "takes arrays, not text"),
        ("audio", np.zeros((3, 2)), r"shape \(3, 2\)"),
        ("audio", ["a"], "numbers in -1 to 1"),
        ("audio", Audio(tone(24_000), 24_000), "has had 8000 samples a second, and now 24000"),
        ("audio", Audio(tone(8_000, 1.1), 8_000), "at most 2 seconds"),
    ],
)
def test_what_is_refused(stream: str, part: Any, word: str) -> None:
    intake = LiveSound("audio", 16_000, 2)
    intake.push("audio", Audio(tone(8_000), 8_000), "r")
    with pytest.raises(RequestError, match=word) as error:
        intake.push(stream, part, "r")
    assert error.value.param == stream
