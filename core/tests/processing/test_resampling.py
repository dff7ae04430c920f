"""Sound at another rate."""

import numpy as np
import pytest

from mstar.processing.resampling import resample, samples_at
from mstar.spec.tasks import Audio


def tone(rate: int) -> np.ndarray:
    return np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)


@pytest.mark.parametrize(("rate", "to"), [(16_000, 24_000), (48_000, 16_000), (44_100, 16_000)])
def test_length_and_pitch_stay(rate: int, to: int) -> None:
    got = resample(tone(rate), rate, to)
    assert (got.dtype, len(got)) == (np.float32, to)
    edge = to // 10
    np.testing.assert_allclose(got[edge:-edge], tone(to)[edge:-edge], atol=2e-3)


def test_what_has_the_rate_is_not_copied() -> None:
    samples = tone(16_000)
    assert samples_at(Audio(samples, 16_000), 16_000) is samples
    assert len(samples_at(Audio(np.zeros(0), 8000), 16_000)) == 0
