"""How sounds are joined: what is a click and what a pause."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.testing.sounds import babble, click, pause

RATE = 24_000


@pytest.mark.parametrize("seed", range(5))
def test_speech_has_no_clicks(seed: int) -> None:
    sound = babble(3.0, seed, RATE)
    found = [click(sound, place, RATE) for place in range(0, len(sound), 997)]
    assert np.percentile(found, 95) < 2


def test_a_step_is_a_click_in_speech_and_in_silence() -> None:
    sound = np.concatenate([babble(1.0, 1, RATE), np.zeros(RATE, np.float32)])
    for place, step in ((RATE // 2, 0.25), (RATE + RATE // 2, 0.01)):
        stepped = sound.copy()
        stepped[place:] += step
        assert click(stepped, place, RATE) > 4 > click(sound, place, RATE)
        assert click(stepped, place + RATE // 4, RATE) < 4


def test_pauses_are_as_long_as_they_are() -> None:
    voice = np.sin(np.arange(RATE) * 0.1)
    sound = np.concatenate([voice, np.zeros(RATE // 2), voice])
    assert pause(sound, RATE + 100, RATE) == pytest.approx(0.5, abs=0.011)
    assert pause(sound, RATE // 2, RATE) == 0
