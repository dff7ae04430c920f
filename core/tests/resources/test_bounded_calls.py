"""Calls that nothing can stop cost their caller a while, not for ever."""

from __future__ import annotations

import threading

import pytest

from mstar.resources.bounded_calls import BoundedCalls

LIMIT_S = 20.0


def test_calls_run_in_order_in_one_thread() -> None:
    bounded, seen = BoundedCalls(), []
    for number in range(3):
        assert bounded.run(lambda n=number: seen.append((n, threading.get_ident())), LIMIT_S)  # type: ignore[misc]
    assert [n for n, _ in seen] == [0, 1, 2]
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_what_a_call_raises_is_raised() -> None:
    bounded = BoundedCalls()

    def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        bounded.run(wrong, LIMIT_S)
    assert bounded.run(lambda: None, LIMIT_S)


def test_a_call_that_takes_too_long_is_given_up_and_the_next_one_runs() -> None:
    bounded, release, ended = BoundedCalls(), threading.Event(), threading.Event()

    def stuck() -> None:
        release.wait(LIMIT_S)
        ended.set()

    assert not bounded.run(stuck, 0.05)
    assert bounded.lost == 1
    assert bounded.run(lambda: None, LIMIT_S)
    release.set()
    assert ended.wait(LIMIT_S)
    while bounded.lost:
        assert bounded.run(lambda: None, LIMIT_S)
