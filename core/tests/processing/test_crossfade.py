"""Overlapping pieces of sound are blended where they overlap, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from mstar.processing.crossfade import Crossfade


def joined(pieces: list[np.ndarray], overlap: int) -> np.ndarray:
    fade = Crossfade(overlap)
    return np.concatenate([*(fade.feed(piece) for piece in pieces), fade.finish()])


@pytest.mark.parametrize("overlap", [0, 1, 5])
def test_pieces_that_agree_stay_as_they_are(overlap: int) -> None:
    sound = np.random.default_rng(3).standard_normal(30, dtype=np.float32)
    pieces = [sound[begin : begin + 10 + (overlap if begin < 20 else 0)] for begin in (0, 10, 20)]
    np.testing.assert_array_equal(joined(pieces, overlap), sound)


def test_pieces_that_do_not_are_blended() -> None:
    got = joined([np.zeros(14, np.float32), np.ones(10, np.float32)], 4)
    assert len(got) == 20
    assert (got[:10] == 0).all()
    assert (got[14:] == 1).all()
    assert (np.diff(got[9:15]) > 0).all()
    np.testing.assert_allclose(got[10:14] + got[13:9:-1], 1, atol=1e-6)  # the weights of the two add up


def test_what_it_is_given_is_not_changed() -> None:
    fade, second = Crossfade(2), np.ones(4, np.float32)
    fade.feed(np.zeros(4, np.float32))
    fade.feed(second)
    assert (second == 1).all()
