"""Between a request's ready calls and the scheduler's steps: calls become items, and batches of items a step's work.

Calls that are foreseen to go on together are one item, a *cohort*: then what the scheduler does for a step of hundreds
of rows is what it does for one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mstar.engine.step import Work
from mstar.graph.calls import CallRun
from mstar.scheduler.base import Batch, Item, Scheduler
from mstar.worker.live import Live
from mstar.worker.portions import Portions, share
from mstar.worker.ranks import Ranks
from mstar.worker.sharing import PromptSharing

__all__ = ["Offers"]


class Offers:
    """What the scheduler is told of and what it answers.

    :param live_of: a call's request, ``None`` if it has ended. :param known: called with a call of which nothing is
        left to compute: another request has computed the rest.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sharing: PromptSharing,
        portions: Portions,
        live_of: Callable[[CallRun], Live | None],
        known: Callable[[Live, CallRun], None],
        ranks: Ranks | None = None,
    ):
        self._scheduler, self._sharing, self._portions, self._ranks = scheduler, sharing, portions, ranks
        self._live_of, self._known = live_of, known

    # --- to the scheduler ---------------------------------------------------------------------------------------------
    def offer(self, call: CallRun, now: float) -> None:
        """*call* may run."""
        self._scheduler.ready(self._item(call, now))

    def offer_together(self, calls: Sequence[CallRun], now: float) -> None:
        """*calls* of one item each, which follow calls of one step and may run in one step again. Kept in order."""
        if len(calls) < 2 or not self._scheduler.cohorts:
            for call in calls:
                self.offer(call, now)
            return
        by: dict[tuple[Any, int], list[CallRun]] = {}
        for call in calls:
            kind = (call.op, call.run.request.priority)
            if kind in by:
                by[kind].append(call)
            else:
                by[kind] = [call]
        for (_, priority), cohort in by.items():
            self._scheduler.ready(self._cohort(cohort, priority, now))

    def _item(self, call: CallRun, now: float) -> Item:
        request = call.run.request
        tokens = call.remaining
        if tokens > 1 and call.op.entry.prefix and (live := self._live_of(call)) is not None:
            tokens = self._sharing.cut(live, call)
        item = Item(
            request.id,
            self._group(call),
            max(-(-tokens // call.op.entry.step_items), 1),
            call.op.entry.chunk is not None,
            call.decode,
            _deadline((call,), now),
            request.priority,
            call,
            rest=call.remaining > tokens,
            patient=call.op.patient,
        )
        call.item = weakref.ref(item)  # the scheduler has it; a request's calls are not to wait for the collector
        return item

    def _cohort(self, calls: list[CallRun], priority: int, now: float) -> Item:
        return Item(
            "",
            self._group(calls[0]),
            len(calls),
            decode=True,
            deadline=_deadline(calls, now),
            priority=priority,
            payload=calls,
            rows=len(calls),
            apart=lambda: [self._item(call, now) for call in calls if not (call.dropped or call.run.over)],
        )

    def _group(self, call: CallRun) -> tuple[Any, ...]:
        return call.group if self._ranks is None else self._ranks.steps.group(call)

    # --- from the scheduler -------------------------------------------------------------------------------------------
    def next_work(self, now: float, may_run: Callable[[tuple[Any, ...]], bool] | None) -> list[Work]:
        """What the next step runs; empty if nothing is ready."""
        while (batch := self._scheduler.next(now, may_run)) is not None:
            work = self._work(batch)
            if work:
                return work
        return []

    def _work(self, batch: Batch) -> list[Work]:
        work: list[Work] = []
        for item, tokens in zip(batch.items, batch.tokens, strict=True):
            if item.apart is not None:
                # some may have ended since they were offered, or are not to be after all
                calls = [call for call in item.payload if not (call.dropped or call.run.over)]
                work += [Work(call, 0, 1, True, False, True) for call in calls]
            elif (part := self._share(item.payload, tokens, not work)) is not None:
                work.append(part)
        return work

    def _share(self, call: CallRun, tokens: int, first: bool) -> Work | None:
        """*call*'s share of the next step. ``None``: it waits for another, or nothing is left of it."""
        if not self._portions.concern(call.op):
            return share(call, tokens)
        if self._ranks is not None and not self._ranks.here(call):
            return Work(call, call.done, call.remaining, True)  # who has the pool cuts it
        live = self._live_of(call)
        assert live is not None
        if self._portions.skip(call):
            self._known(live, call)
            return None
        work = self._portions.work(call, tokens, first)
        if work is None:
            self.offer(call, time.monotonic())
        return work


def _deadline(calls: Sequence[CallRun], now: float) -> float | None:
    """When the first of those falls silent who play what *calls* make; ``None``: nobody does."""
    due = None
    for call in calls:
        for out in call.partition.feeds:
            when = now if out.played_until is None else out.played_until
            if due is None or when < due:
                due = when
    return due
