"""Windows cover the clip, stay within the bound, and end where it is quiet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.processing.speech.windows import WindowPolicy, cut, rest_of, spans, speaks
from mstar.spec.knobs import Knobs
from mstar.spec.tasks import Audio, TranscriptionTask

RATE = 1000


def speech(seconds: float, pauses: list[tuple[float, float]]) -> np.ndarray:
    """Noise with silence between each (start, end) of *pauses*."""
    samples = np.random.default_rng(1).normal(0, 0.1, round(seconds * RATE)).astype(np.float32)
    for start, end in pauses:
        samples[round(start * RATE) : round(end * RATE)] = 0
    return samples


def task(samples: np.ndarray) -> TranscriptionTask:
    return TranscriptionTask(knobs=Knobs(), audio=Audio(samples, RATE))


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 20_000),
    window=st.floats(0.02, 30),
    search=st.floats(0, 10),
    seed=st.integers(0, 99),
)
def test_every_sample_is_in_one_window_of_bounded_length(total: int, window: float, search: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(0, 1, total).astype(np.float32)
    pieces = spans(samples, RATE, WindowPolicy(window, search_s=search))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(0 < end - start <= max(1, int(window * RATE)) for start, end in pieces)


def test_a_clip_that_fits_stays_whole() -> None:
    policy = WindowPolicy(16, whole_s=20)
    assert spans(speech(20, []), RATE, policy) == [(0, 20_000)]
    assert len(spans(speech(20.001, []), RATE, policy)) == 2


def test_cuts_are_in_the_pauses() -> None:
    pauses = [(9.2, 9.5), (13.6, 13.65), (14.1, 14.4), (26.4, 26.8)]  # even would be 13.7 and 27.3
    pieces = spans(speech(41, pauses), RATE, WindowPolicy(16, search_s=5))
    assert [start for start, _ in pieces[1:]] == pytest.approx([14_250, 26_600], abs=150)
    pieces = spans(speech(30, [(12.7, 13.1)]), RATE, WindowPolicy(20))
    (boundary,) = [start for start, _ in pieces[1:]]
    assert 12_700 <= boundary <= 13_100


def test_without_pauses_windows_are_alike() -> None:
    samples = np.full(100_000, 0.1, dtype=np.float32)
    lengths = [end - start for start, end in spans(samples, RATE, WindowPolicy(30))]
    assert len(lengths) == 4
    assert max(lengths) - min(lengths) <= 60


def test_another_measure_of_quiet() -> None:
    """A voice detector says where there is speech, loud or not."""

    def voice(samples: np.ndarray, rate: int) -> tuple[np.ndarray, int]:
        found = np.ones(-(-len(samples) // 50))
        found[14_000 // 50 : 14_200 // 50] = 0
        return found, 50

    pieces = spans(speech(30, [(15.0, 15.4)]), RATE, WindowPolicy(20, levels=voice))
    assert 14_000 <= pieces[1][0] <= 14_200


def test_windows_of_a_task_know_their_place() -> None:
    samples = speech(50, [])
    windows = cut(task(samples), WindowPolicy(20).within(10))
    assert np.array_equal(np.concatenate([w.audio.samples for w in windows if w.audio]), samples)
    lengths = np.cumsum([len(w.audio.samples) / RATE for w in windows if w.audio])
    assert [w.offset for w in windows] == pytest.approx([0, *lengths[:-1]])
    live = TranscriptionTask(knobs=Knobs(), audio=None)
    assert list(cut(live, WindowPolicy(20))) == [live]


def test_a_rest_is_what_still_sounds() -> None:
    samples = speech(10, [(8.0, 10.0)])
    rest = rest_of(task(samples), 4.0)
    assert rest is not None
    assert rest.audio is not None
    assert (rest.offset, len(rest.audio.samples)) == (4.0, 6000)
    assert rest_of(task(samples), 7.9) is None  # silence
    assert rest_of(task(samples[:8000]), 7.5) is None  # too short
    assert rest_of(task(samples), 0.0) is None  # nothing was heard: it would be the same again
    assert speaks(samples, RATE)
    assert not speaks(samples[8000:], RATE)
