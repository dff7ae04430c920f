"""Look-ahead: which steps a worker launches before it knows that they are to be.

While a step runs, the calls that will follow its calls unless a loop ends are foreseen
(:class:`mstar.graph.foresight.Foresight`) and offered to the scheduler, or, while nothing else wants to run, kept as
the *cohort*: the next step, without asking anybody. Where a loop ended after all, the call that should not have been is
dropped: its launch is retracted from the resources, or it never starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mstar.engine.engine import Engine, Flight
from mstar.engine.step import Work
from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.graph.run import RequestRun
from mstar.scheduler.base import Scheduler
from mstar.spec.deployment import Deployment
from mstar.worker.live import Live
from mstar.worker.ranks import Ranks

__all__ = ["LookAhead", "looks_ahead"]


def looks_ahead(deployment: Deployment, device: torch.device) -> bool:
    """Whether a worker launches a step before the one before has landed: as the deployment says, else on a GPU."""
    ahead = deployment.engine.lookahead
    return device.type == "cuda" if ahead is None else ahead


class LookAhead:
    """What a worker has foreseen.

    :param offer: tells the scheduler of a ready call. :param live_of: a call's request, ``None`` if it has ended.
    :param share: makes of a call and of the tokens that a step has for it its share of the step, or ``None`` if it gets
        none; told whether it would be the step's first.
    :param ranks: the other ranks, some of which may be busy; those that run a step with this one retract it too.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        offer: Callable[[CallRun, float], None],
        live_of: Callable[[CallRun], Live | None],
        share: Callable[[CallRun, int, bool], Work | None],
        ranks: Ranks | None = None,
    ):
        self._ranks = ranks
        self._may_run = None if ranks is None else ranks.steps.may_run_here
        self._engine, self._scheduler, self._offer, self._live_of = engine, scheduler, offer, live_of
        self._share = share
        self._foreseeable: dict[CallOp, bool] = {}
        self._cohort: list[CallRun] = []  # the next step, if nothing else comes in between

    def next_work(self, now: float) -> list[Work]:
        """What the next step runs. While the calls of one step all follow those of the step before, and nobody else has
        anything to run, the scheduler has nothing to choose and is not asked."""
        cohort, self._cohort = self._cohort, []
        if cohort and not self._scheduler.idle:
            for call in cohort:
                self._offer(call, now)
            cohort = []
        return self._chosen(now, self._may_run) or [Work(call, 0, 1, True) for call in cohort]

    def next_elsewhere(self, now: float) -> list[Work]:
        """What a step on other ranks runs, of which one has room for it; empty if there is nothing."""
        assert self._ranks is not None
        return self._chosen(now, self._ranks.steps.may_run_elsewhere)

    def _chosen(self, now: float, may_run: Callable[[tuple[Any, ...]], bool] | None) -> list[Work]:
        while (batch := self._scheduler.next(now, may_run)) is not None:
            work: list[Work] = []
            for item, tokens in zip(batch.items, batch.tokens, strict=True):
                share = self._share(item.payload, tokens, not work)
                if share is not None:
                    work.append(share)
            if work:
                return work
        return []

    def foresee(self, flights: Sequence[Flight]) -> None:
        """Make ready what will follow the calls of *flights*, which still run."""
        for flight in flights:
            self._foresee(flight, len(flights) == 1)

    def _foresee(self, flight: Flight, alone: bool) -> None:
        if flight.outcome is None:
            return
        foreseen, all_again = [], alone
        for w, result in zip(flight.work, flight.outcome.results, strict=True):
            call = w.call
            if self._live_of(call) is None or result.outputs is None or call.dropped:
                all_again &= result.outputs is not None
                continue
            ahead = call.run.foresight.foresee(call, result.outputs, self._may)
            if ahead is None:
                continue
            foreseen.append(ahead)
            all_again = all_again and ahead.op is call.op and ahead.length == 1 and not call.op.varying
        if all_again and self._scheduler.idle:
            self._cohort = foreseen
            return
        now = time.monotonic()
        for ahead in foreseen:
            self._offer(ahead, now)

    def _may(self, op: CallOp) -> bool:
        """Whether a launch of *op* can be retracted."""
        may = self._foreseeable.get(op)
        if may is None:
            resources = self._engine.resources
            here = self._ranks is None or self._ranks.seats.always_here(op)  # nothing is foreseen for others
            may = self._foreseeable[op] = here and all(resources[name].speculates for name in op.entry.resources)
        return may

    def drop(self, call: CallRun) -> None:
        """*call* was foreseen and is not to be."""
        call.dropped = True
        if call.flight is not None:
            if call.flight.failure is None:
                self._engine.retract(call.flight, call.index)
                if self._ranks is not None:
                    self._ranks.steps.retracted(call.flight, call.index)
                self._engine.trace.retracted(call.flight, call.run.request.id)
        elif call.item is not None and (item := call.item()) is not None:
            self._scheduler.drop(item)
        else:
            self._cohort.remove(call)

    def forget(self, run: RequestRun) -> None:
        """*run* has ended."""
        if self._cohort:
            self._cohort = [call for call in self._cohort if call.run is not run]

    def clear(self) -> None:
        self._cohort.clear()
