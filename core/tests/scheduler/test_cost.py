"""Cost grows with the batch, not with what waits (P9): bytecodes executed are counted, not time."""

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest

from mstar.scheduler.base import Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.spec.deployment import SchedulerOptions

FEW, MANY = 10, 10_000


class Counted(Item):
    """An item that counts comparisons, so that a search inside a C function is seen as well."""

    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return self is other

    __hash__ = object.__hash__


def operations(work: Callable[[], object]) -> int:
    """Bytecodes that *work* executes, plus comparisons of items."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, Counted.comparisons = sys.gettrace(), 0
    gc.disable()  # its callbacks and finalizers, of other tests' making, would be counted as well
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count + Counted.comparisons


def filled(items=FEW, tickets=FEW, groups=1, deadlines=False, rows=8):
    s = DefaultScheduler(SchedulerOptions(max_queue=MANY, max_step_rows=rows))
    for n in range(tickets):
        s.submit(Ticket(f"t{n}", tenant=f"tenant {n % 100}", priority=n % 3))
    for n in range(items):
        s.ready(Counted(str(n), ("lm", n % groups), decode=True, deadline=float(-n) if deadlines else None))
    return s


def cycle(s, now=1.0):
    s.start(lambda ticket: False)
    for item in s.next(now).items:
        s.ready(item)


@pytest.mark.parametrize("what", ["tickets", "items"])
def test_a_step_costs_the_same_whatever_waits(what):
    few, many = (filled(**{what: n}) for n in (FEW, MANY))
    for s in (few, many):
        cycle(s)  # learn the step's length
    assert operations(lambda: cycle(many)) == operations(lambda: cycle(few))


def test_a_step_costs_the_same_among_thousands_of_groups():
    few, many = filled(items=FEW, groups=FEW), filled(items=MANY, groups=MANY)
    assert operations(lambda: cycle(many)) == operations(lambda: cycle(few))


def test_deadlines_add_no_more_than_a_logarithm():
    few, many = (filled(items=n, deadlines=True) for n in (FEW, MANY))
    few_cost, many_cost = (operations(lambda s=s: cycle(s)) for s in (few, many))
    assert many_cost <= 1.5 * few_cost


def test_starting_costs_the_same_however_many_wait():
    few, many = filled(tickets=FEW), filled(tickets=MANY)

    def start(s):
        room = iter(range(3))
        assert len(s.start(lambda ticket: next(room, None) is not None)) == 3

    few_cost, many_cost = operations(lambda: start(few)), operations(lambda: start(many))
    assert many_cost <= few_cost * 1.2


def test_forgetting_costs_what_the_request_holds():
    few, many = (filled(items=n, tickets=n) for n in (FEW, MANY))
    for request in ("5", "t5"):
        assert operations(lambda r=request: many.forget(r)) <= operations(lambda r=request: few.forget(r)) * 1.2


def test_cost_grows_with_the_rows():
    small, large = filled(items=4, rows=256), filled(items=256, rows=256)
    small_cost, large_cost = operations(lambda: cycle(small)), operations(lambda: cycle(large))
    assert large_cost - small_cost == pytest.approx(252 * (large_cost / 256), rel=0.25)


def test_the_scheduler_needs_no_torch():
    program = "import sys, mstar.scheduler.default; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
