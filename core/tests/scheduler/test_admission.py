"""The queue of waiting requests: bounds, fairness, head of line, advice to clients that are turned away."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.scheduler.admission import AdmissionQueue
from mstar.scheduler.base import Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.spec.deployment import SchedulerOptions
from mstar.spec.errors import TooBusy


def scheduler(**options):
    return DefaultScheduler(SchedulerOptions(**options))


def submit(target, *names, tenant="", priority=0):
    for name in names:
        target.submit(Ticket(name, tenant=tenant, priority=priority))


def started(target, room=10**6):
    """Names of the requests that start while there is room for *room*."""
    left = iter(range(room))
    return [ticket.request for ticket in target.start(lambda ticket: next(left, None) is not None)]


def test_first_come_first_served():
    s = scheduler()
    submit(s, "a", "b", "c")
    assert s.waiting == 3
    assert started(s, 2) == ["a", "b"]
    assert s.waiting == 1
    assert started(s) == ["c"]
    assert s.waiting == 0


def test_higher_priorities_go_first():
    s = scheduler()
    submit(s, "low", priority=-1)
    submit(s, "plain")
    submit(s, "high", priority=7)
    assert started(s) == ["high", "plain", "low"]


def test_tenants_take_turns():
    s = scheduler()
    submit(s, *(f"a{i}" for i in range(4)), tenant="a")
    submit(s, "b0", "b1", tenant="b")
    submit(s, "c0", tenant="c")
    assert started(s) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_turns_go_on_between_calls():
    s = scheduler()
    submit(s, "a0", "a1", tenant="a")
    submit(s, "b0", "b1", tenant="b")
    assert [started(s, 1) for _ in range(4)] == [["a0"], ["b0"], ["a1"], ["b1"]]


def test_fifo_fairness_ignores_tenants():
    s = scheduler(fairness="fifo")
    submit(s, "a0", "a1", tenant="a")
    submit(s, "b0", tenant="b")
    assert started(s) == ["a0", "a1", "b0"]


def test_a_refused_request_stays_first():
    s = scheduler()
    submit(s, "large", tenant="a")
    submit(s, "small", tenant="b")
    asked = []

    def admit(ticket):
        asked.append(ticket.request)
        return False

    assert s.start(admit) == []
    assert asked == ["large"], "nothing may pass a large request that waits for room"
    assert started(s) == ["large", "small"]


def test_only_a_higher_priority_passes_a_refused_request():
    s = scheduler()
    submit(s, "large")
    assert started(s, 0) == []
    submit(s, "urgent", priority=1)
    assert started(s) == ["urgent", "large"]


def test_full_queue_turns_away_and_takes_again():
    s = scheduler(max_queue=2)
    submit(s, "a", "b")
    with pytest.raises(TooBusy, match="2 requests wait") as refused:
        submit(s, "c")
    assert refused.value.status == 429
    assert refused.value.retry_after == AdmissionQueue.MIN_RETRY
    s.forget("a")
    submit(s, "c")
    assert started(s) == ["b", "c"]


def test_a_queue_of_none_still_lets_a_request_through():
    s = scheduler(max_queue=0)
    submit(s, "a")
    with pytest.raises(TooBusy):
        submit(s, "b")
    assert started(s) == ["a"]
    submit(s, "b")


@pytest.mark.parametrize(
    ("seconds_apart", "advice"),
    [(0.001, AdmissionQueue.MIN_RETRY), (0.5, 5.0), (60.0, AdmissionQueue.MAX_RETRY)],
)
def test_retry_after_follows_the_completion_rate(seconds_apart, advice):
    s = scheduler(max_queue=20)
    submit(s, *(f"r{i}" for i in range(11)))
    started(s)
    for i in range(10):
        s.next(i * seconds_apart)
        s.forget(f"r{i}")
    submit(s, *(f"w{i}" for i in range(20)))
    with pytest.raises(TooBusy) as refused:
        submit(s, "one too many")
    assert refused.value.retry_after == pytest.approx(advice)  # half of 20 waiting, one every 0.5 s


def test_retry_after_grows_while_nothing_ends():
    s = scheduler(max_queue=20)
    submit(s, "a", "b", "runs on")
    started(s)
    for i, name in enumerate("ab"):
        s.next(float(i))
        s.forget(name)
    submit(s, *(f"w{i}" for i in range(20)))
    with pytest.raises(TooBusy) as refused:
        s.submit(Ticket("late", arrival=4.0))
    assert refused.value.retry_after == pytest.approx(40.0)  # one end in 4 s, 10 to go


def test_an_idle_hour_is_not_taken_for_slowness():
    s = scheduler(max_queue=20)
    submit(s, "a", "b")
    started(s)
    for i, name in enumerate("ab"):
        s.next(float(i))
        s.forget(name)
    for n in range(20):
        s.submit(Ticket(f"w{n}", arrival=3600.0))
    with pytest.raises(TooBusy) as refused:
        s.submit(Ticket("late", arrival=3600.0))
    assert refused.value.retry_after == AdmissionQueue.MIN_RETRY


def test_forget_returns_the_ticket_only_while_it_waits():
    s = scheduler()
    submit(s, "a", "b")
    ticket = s.forget("a")
    assert ticket is not None
    assert ticket.request == "a"
    assert started(s) == ["b"]
    assert s.forget("b") is None
    assert s.forget("never seen") is None


def test_a_request_is_queued_once():
    s = scheduler()
    submit(s, "a")
    with pytest.raises(ValueError, match="'a' is queued already"):
        submit(s, "a")


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("abc"), st.integers(0, 2)),
    st.tuples(st.just("start"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("forget"), st.integers(0, 40), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 12))
def test_none_lost_none_twice_in_order_within_a_tenant(actions, limit):
    s = scheduler(max_queue=limit)
    waiting: dict[str, Ticket] = {}
    submitted = 0
    starts = defaultdict(list)
    for action, x, y in actions:
        if action == "submit":
            ticket = Ticket(str(submitted), tenant=x, priority=y)
            submitted += 1
            if len(waiting) == limit:
                with pytest.raises(TooBusy):
                    s.submit(ticket)
            else:
                s.submit(ticket)
                waiting[ticket.request] = ticket
        elif action == "forget":
            assert s.forget(str(x)) is waiting.pop(str(x), None)
        else:
            expected = min(x, len(waiting))
            names = started(s, x)
            assert len(names) == expected
            for name in names:
                ticket = waiting.pop(name)
                assert all(other.priority <= ticket.priority for other in waiting.values())
                starts[ticket.tenant, ticket.priority].append(int(name))
        assert s.waiting == len(waiting)
    assert sorted(started(s)) == sorted(waiting)
    for order in starts.values():
        assert order == sorted(order)


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 30), min_size=1), st.integers(1, 60))
def test_turns_are_exact_whatever_the_queues_lengths(loads, room):
    s = scheduler()
    for tenant, load in loads.items():
        submit(s, *(f"{tenant}{i}" for i in range(load)), tenant=tenant)
    rounds = [f"{tenant}{i}" for i in range(30) for tenant, load in loads.items() if i < load]
    assert started(s, room) == rounds[:room]
