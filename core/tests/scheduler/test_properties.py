"""Invariants under random use: nothing lost, nothing twice, budgets kept, nothing starved."""

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.scheduler.base import Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.scheduler.groups import GATHER, PATIENCE
from mstar.spec.deployment import SchedulerOptions

GROUPS = [("lm",), ("codec",), ("denoise", 64)]


class ReadyItems(RuleBasedStateMachine):
    """Random items come and go; a plain dictionary is the oracle of what must be ready."""

    @initialize(rows=st.integers(1, 5), tokens=st.integers(1, 12), limit=st.none() | st.integers(1, 3))
    def begin(self, rows, tokens, limit):
        self.limits = {GROUPS[2]: limit}
        self.options = SchedulerOptions(max_step_rows=rows, max_step_tokens=tokens)
        self.scheduler = DefaultScheduler(self.options, self.limits.get)
        for request in "abcdef":
            self.scheduler.submit(Ticket(request))
        self.scheduler.start(lambda ticket: True)
        self.ready: dict[Item, None] = {}  # in the order of arrival, so that examples can be replayed
        self.cut: list[Item] = []
        self.now = 0.0

    @rule(
        request=st.sampled_from("abcdef"),
        group=st.sampled_from(GROUPS),
        tokens=st.integers(0, 20),
        sort=st.sampled_from(["decode", "chunk", "whole"]),
        due_in=st.none() | st.floats(-5, 20),
        priority=st.integers(0, 1),
        patient=st.booleans(),
    )
    def add(self, request, group, tokens, sort, due_in, priority, patient):
        item = Item(
            request,
            group,
            tokens=tokens,
            chunkable=sort == "chunk",
            decode=sort == "decode",
            deadline=None if due_in is None else self.now + due_in,
            priority=priority,
            payload=object(),
            patient=patient,
        )
        self.scheduler.ready(item)
        self.ready[item] = None

    @precondition(lambda self: self.cut)
    @rule()
    def hand_in_again(self):
        item = dataclasses.replace(self.cut.pop(0))  # a new item for the rest of the same call
        self.scheduler.ready(item)
        self.ready[item] = None

    @rule(seconds=st.floats(0, 3))
    def step(self, seconds):
        self.now += seconds
        batch = self.scheduler.next(self.now)
        if batch is None:
            assert not any(not item.cancelled for item in self.ready)
            self.ready.clear()
            return
        assert len(set(batch.items)) == len(batch.items) == len(batch.tokens) > 0
        assert self.ready.keys() >= set(batch.items)
        assert all(item.group == batch.group and not item.cancelled for item in batch.items)
        assert len(batch.items) <= min(self.options.max_step_rows, self.limits.get(batch.group) or 99)
        assert [i.decode for i in batch.items] == sorted((i.decode for i in batch.items), reverse=True)
        budget = self.options.max_step_tokens
        if sum(batch.tokens) > budget:
            assert batch.tokens == [batch.items[0].tokens], "only a call that cannot be cut exceeds the budget, alone"
            assert not batch.items[0].chunkable
        for item, tokens in zip(batch.items, batch.tokens, strict=True):
            del self.ready[item]
            assert tokens == item.tokens or (item.chunkable and 0 < tokens < item.tokens)
            if tokens < item.tokens:
                item.tokens -= tokens
                self.cut.append(item)

    @rule(request=st.sampled_from("abcdef"))
    def forget(self, request):
        self.scheduler.forget(request)
        gone = {item for item in self.ready if item.request == request}
        assert all(item.cancelled for item in gone)
        self.ready = {item: None for item in self.ready if item not in gone}
        self.cut = [item for item in self.cut if item.request != request]

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def cancel_one(self, data):
        data.draw(st.sampled_from(list(self.ready))).cancelled = True

    @invariant()
    def books_balance(self):
        if not hasattr(self, "scheduler"):
            return
        held = {item for items in self.scheduler._items.values() for item in items}
        assert {i for i in held if not i.cancelled} == {i for i in self.ready if not i.cancelled}
        cut = {item.payload for items in self.scheduler._cut.values() for item in items}
        assert cut <= {item.payload for item in self.cut}

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not (self.ready or self.cut):
                break
            while self.cut:
                self.hand_in_again()
            self.step(0.1)
        s = self.scheduler
        assert not any((self.ready, s._items, s._cut, s._turns, s._deadlines)), "everything must have run"


TestReadyItems = ReadyItems.TestCase
TestReadyItems.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

SORTS = st.sampled_from(["decode", "chunk", "whole"])


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 16),
    rivals=st.lists(st.tuples(st.sampled_from(GROUPS), SORTS, st.integers(1, 20), st.booleans()), max_size=12),
    group=st.sampled_from(GROUPS),
    sort=SORTS,
    size=st.integers(1, 40),
    patient=st.booleans(),
)
def test_nothing_starves(rows, tokens, rivals, group, sort, size, patient):
    """One call among rivals that come back after every step, some of them overdue, is done within a bound that depends
    only on how many rivals stand before it."""
    s = DefaultScheduler(SchedulerOptions(max_step_rows=rows, max_step_tokens=tokens))

    def item(name, group, sort, size, overdue=False):
        return Item(
            name, group, size, chunkable=sort == "chunk", decode=sort == "decode", deadline=-1.0 if overdue else None
        )

    sizes = {}
    for n, (rival_group, rival_sort, rival_size, overdue) in enumerate(rivals):
        rival = item(str(n), rival_group, rival_sort, rival_size, overdue)
        sizes[rival] = rival_size
        s.ready(rival)
    target = item("target", group, sort, size)
    if patient:
        target.patient, target.deadline = True, 1e9
    for name in ("target", *map(str, range(len(rivals)))):
        s.submit(Ticket(name))
    s.start(lambda ticket: True)
    s.ready(target)

    chunk_steps = sum(n // tokens + 1 for n in [size, *sizes.values()])
    services = (len(rivals) + 1 + chunk_steps) * 8  # a cut call makes at least an eighth of a step's progress
    bound = services * (PATIENCE + 1) + chunk_steps * GATHER * patient
    for n in range(bound):
        batch = s.next(float(n))
        for done, part in zip(batch.items, batch.tokens, strict=True):
            left = done.tokens - part
            if done is target and left == 0:
                return
            done.tokens = left or sizes[done]
            s.ready(done)
    raise AssertionError(f"not done after {bound} steps")
