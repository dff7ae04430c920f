"""What is due first, whatever came and went."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mstar.scheduler.deadlines import Deadlines


@dataclass(eq=False)
class Thing:
    deadline: float | None


@given(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 9)), st.booleans()), max_size=60))
def test_the_earliest_of_those_that_are_left_is_first(script: list[tuple[int | None, bool]]) -> None:
    """*script*: the deadline of what comes next, and whether the first one leaves after that."""
    deadlines: Deadlines[Thing] = Deadlines()
    held: list[Thing] = []
    for deadline, leaves in script:
        thing = Thing(deadline)
        deadlines.add(thing)
        if deadline is not None:
            held.append(thing)
        earliest = min(held, key=lambda t: t.deadline or 0, default=None)  # of equals, the one that came first
        assert deadlines.first() is earliest
        assert bool(deadlines) == bool(held)
        if leaves and earliest is not None:
            held.remove(earliest)
            deadlines.discard(earliest)


def test_what_left_takes_no_memory() -> None:
    deadlines: Deadlines[Thing] = Deadlines()
    for number in range(10_000):
        thing = Thing(float(number))
        deadlines.add(thing)
        deadlines.discard(thing)
    assert len(deadlines._heap) < 100
    assert not deadlines
    assert deadlines.first() is None
