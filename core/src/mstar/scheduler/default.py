"""The default policy. No torch.

*Admission.* A bounded queue with priorities, turns between tenants and first come, first served within a tenant; see
:class:`~mstar.scheduler.admission.AdmissionQueue`.

*Steps.* Groups with ready items take turns, so that none starves: a codec beside a language model, a prompt's encoder
beside a denoise loop. An item whose deadline is near calls its group out of turn, earliest deadline first.

A step of few rows costs nearly what one of many does. So a group *gathers*: it leaves its turn to another while all
that it holds may wait (:attr:`~mstar.scheduler.base.Item.patient`: pieces of streams that somebody listens to), no
deadline comes near, and running requests may still send it more. It does so a few times in a row at most, and never
when nothing else could run. What has no slack is never held back: a listener's first piece, one who is about to fall
silent, and whatever shares a group with these.

Calls that go on together step after step are one item, a cohort, as long as the whole group fits into a step. Where it
does not, each of them has an item of its own, and they share the steps by deadline and turn.

Within a group, loops that already run go first, then calls that may be cut share the tokens that remain (chunked
prefill as in Sarathi-Serve, arXiv:2403.02310), then other new calls; see :class:`~mstar.scheduler.groups.Group`. Where
many rows decode (``max_mixed_rows``), new calls have steps of their own, in turn with the decodes'.

*Cost.* Every operation costs time proportional to what it returns; deadlines add the logarithm of their number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from mstar.scheduler.admission import AdmissionQueue, CompletionRate
from mstar.scheduler.base import Batch, Item, Scheduler, Ticket
from mstar.scheduler.deadlines import Deadlines
from mstar.scheduler.groups import Group
from mstar.spec.deployment import SchedulerOptions

__all__ = ["DefaultScheduler"]


class DefaultScheduler(Scheduler):
    """Decode first, prefill in chunks beside it, groups in turn, near deadlines out of turn.

    Priorities are strict (a larger number goes first) for waiting requests, and among ready items of one sort. Not safe
    to call from several threads, nor from within *admit*.

    :param group_limits: the most rows of one step of a group (:attr:`mstar.spec.graph.NodeSpec.max_rows`), or ``None``.
    """

    cohorts = True

    #: steps in a row that deadlines may take out of turn while other groups wait
    URGENT_RUN = 3
    #: a group gathers while its first deadline is so many times further than one that is near
    MARGIN = 2
    #: groups that may be passed over in one choice
    LOOK = 8
    #: groups without ready items that are kept for their next item
    SPARE_GROUPS = 64

    def __init__(
        self,
        options: SchedulerOptions,
        group_limits: Callable[[tuple[Any, ...]], int | None] = lambda group: None,
    ):
        self.options = options
        self._limits = group_limits
        self._queue = AdmissionQueue(options.max_queue, by_tenant=options.fairness == "tenant")
        self._rate = CompletionRate()
        self._running: set[str] = set()
        self._items: dict[str, set[Item]] = {}
        self._cut: dict[str, list[Item]] = {}
        self._groups: dict[tuple[Any, ...], Group] = {}
        self._turns: OrderedDict[Group, None] = OrderedDict()
        self._deadlines: Deadlines[Item] = Deadlines()
        self._step_tokens = options.step_tokens("cpu")  # a worker has filled in what its device has
        self._urgent_run = self._steps = 0
        self._now = 0.0
        self._step_began: float | None = None
        self._step_seconds = 0.0

    # --- admission ------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._turns

    def submit(self, ticket: Ticket) -> None:
        self._now = max(self._now, ticket.arrival)
        if not (self._running or self._queue):
            self._rate.restart()
        self._queue.push(ticket, self._rate.at(self._now))

    def start(self, admit: Callable[[Ticket], bool]) -> Sequence[Ticket]:
        started = self._queue.start(admit)
        for ticket in started:
            self._running.add(ticket.request)
        return started

    def forget(self, request: str) -> Ticket | None:
        for item in self._items.pop(request, ()):
            item.cancelled = True
            self._remove(item)
        self._cut.pop(request, None)
        if request in self._running:
            self._running.remove(request)
            self._rate.record(self._now)
        return self._queue.remove(request)

    # --- steps ----------------------------------------------------------------------------------------------------
    def ready(self, item: Item) -> None:
        """*item* may run; until it is returned, only its ``cancelled`` may change."""
        if item.cancelled:
            return
        held = self._items.get(item.request)
        if item.apart is not None:
            pass  # it is nobody's
        elif held is None:
            self._items[item.request] = {item}
        elif item in held:
            raise ValueError(f"an item of request {item.request!r} is ready already")
        else:
            held.add(item)
        group = self._groups.get(item.group)
        if group is None:
            group = self._add_group(item.group)
        if not group:
            group.begin(self._steps)
        group.add(item, front=bool(self._cut) and self._was_cut(item))
        self._turns[group] = None  # a group that is waiting for its turn keeps its place
        if item.deadline is not None:
            self._deadlines.add(item)

    def drop(self, item: Item) -> None:
        item.cancelled = True
        self._remove(item)
        self._release(item)

    def next(self, now: float, may_run: Callable[[tuple[Any, ...]], bool] | None = None) -> Batch | None:
        self._watch_clock(now)
        while self._turns:
            # Two steps, another group's and its own, and one more for every other group that may be due as well.
            urgent = now + self._step_seconds * (len(self._turns) + 1)
            group = self._urgent_group(urgent)
            if group is None or (may_run is not None and not may_run(group.key)):
                group = self._whose_turn(may_run, now + self.MARGIN * (urgent - now))
                if group is None:
                    return None
            if not group.leaves_whole(self.options.max_step_rows, self._step_tokens):
                self._take_apart(group)
            batch, cut = group.fill(self.options.max_step_rows, self._step_tokens, urgent)
            if batch.items:
                self._steps += 1
                group.begin(self._steps)
            for item in cut:
                self._cut.setdefault(item.request, []).append(item)
            if group:
                self._turns.move_to_end(group)
            else:
                del self._turns[group]
            if batch.items:
                self._step_began = now
                return batch
        return None

    def _take_apart(self, group: Group) -> None:
        """Put the items that *group*'s cohorts stand for in their place. The group keeps its own."""
        for cohort in list(group.cohorts):
            group.remove(cohort)
            self._deadlines.discard(cohort)
            for item in cohort.apart() if cohort.apart is not None else ():
                self.ready(item)

    def _whose_turn(self, may_run: Callable[[tuple[Any, ...]], bool] | None, comfortable: float) -> Group | None:
        """The first in turn that can run. Groups that gather keep their place and leave this turn to the next ones."""
        if len(self._turns) > 1:
            most = min(self.options.max_step_rows, len(self._running))
            for group in islice(self._turns, self.LOOK + 1):
                if (may_run is None or may_run(group.key)) and not group.gathers(self._steps, most, comfortable):
                    return group
        return self._first_in_turn(may_run)

    def _first_in_turn(self, may_run: Callable[[tuple[Any, ...]], bool] | None) -> Group | None:
        """Whose turn it is among the groups that can run."""
        if may_run is None:
            return next(iter(self._turns))
        return next((group for group in self._turns if may_run(group.key)), None)

    def _urgent_group(self, urgent: float) -> Group | None:
        item = self._deadlines.first()
        if item is None or item.deadline is None or item.deadline > urgent:
            self._urgent_run = 0
            return None
        if len(self._turns) == 1:  # nobody is passed over
            self._urgent_run = 0
        elif self._urgent_run >= self.URGENT_RUN:
            self._urgent_run = 0
            return None
        else:
            self._urgent_run += 1
        return self._groups[item.group]

    def _watch_clock(self, now: float) -> None:
        """Learn how long steps take: the longest of late, so that a deadline is not missed by an optimistic guess."""
        self._now = max(self._now, now)
        if self._step_began is not None:
            self._step_seconds = max(now - self._step_began, 0.9 * self._step_seconds)
            self._step_began = None

    # --- books ----------------------------------------------------------------------------------------------------
    def _add_group(self, key: tuple[Any, ...]) -> Group:
        if len(self._groups) > 2 * len(self._turns) + self.SPARE_GROUPS:
            self._groups = {group.key: group for group in self._turns}
        group = self._groups[key] = Group(key, self._limits(key), self._release, self.options.max_mixed_rows)
        return group

    def _remove(self, item: Item) -> None:
        group = self._groups[item.group]
        group.remove(item)
        if not group:
            del self._turns[group]
        self._deadlines.discard(item)

    def _release(self, item: Item) -> None:
        if item.apart is None:
            held = self._items[item.request]
            if len(held) == 1:
                del self._items[item.request]
            else:
                held.remove(item)
        if item.deadline is not None:
            self._deadlines.discard(item)

    def _was_cut(self, item: Item) -> bool:
        """Whether *item* is the rest of a call that a step cut; told by the payload, which stands for the call."""
        cut = self._cut.get(item.request, ())
        for n, other in enumerate(cut):
            if other.payload is item.payload and other.group == item.group:
                del self._cut[item.request][n]
                if not self._cut[item.request]:
                    del self._cut[item.request]
                return True
        return False
