from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mstar.processing.once import OncePer


class Thing:
    """Equal to every other, and not hashable."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_each_object_is_made_once_and_forgotten_with_it() -> None:
    made: list[int] = []
    once = OncePer(lambda thing: made.append(id(thing)) or len(made))
    one, two = Thing(), Thing()
    assert [once(one), once(two), once(one), once(two)] == [1, 2, 1, 2]
    assert len(once) == 2
    del one
    gc.collect()
    assert len(once) == 1


def test_who_asks_meanwhile_waits_for_the_same() -> None:
    begun, may, calls = threading.Event(), threading.Event(), []

    def make(thing: Thing) -> object:
        calls.append(thing)
        begun.set()
        assert may.wait(30)
        return object()

    once, thing = OncePer(make), Thing()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(once, thing)
        assert begun.wait(30)
        others = [pool.submit(once, thing) for _ in range(2)]
        may.set()
        assert {id(found.result()) for found in (first, *others)} == {id(first.result())}
    assert len(calls) == 1


def test_a_failure_is_told_and_tried_again() -> None:
    answers = iter([ValueError("no"), 5])

    def make(thing: Thing) -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    once, thing = OncePer(make), Thing()
    with pytest.raises(ValueError, match="no"):
        once(thing)
    assert once(thing) == 5
