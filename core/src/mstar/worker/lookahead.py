"""Look-ahead: which steps a worker launches before it knows that they are to be.

While a step runs, the calls that will follow its calls unless a loop ends are foreseen
(:class:`mstar.graph.foresight.Foresight`) and offered to the scheduler: those that go on as before together, as one
item. Where a loop ended after all, the call that should not have been is dropped: its launch is retracted from the
resources, or it never starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from mstar.engine.engine import Engine, Flight
from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.scheduler.base import Scheduler
from mstar.spec.deployment import Deployment
from mstar.worker.offers import Offers
from mstar.worker.ranks import Ranks

__all__ = ["LookAhead", "looks_ahead"]


def looks_ahead(deployment: Deployment, device: torch.device) -> bool:
    """Whether a worker launches a step before the one before has landed: as the deployment says, else on a GPU."""
    ahead = deployment.engine.lookahead
    return device.type == "cuda" if ahead is None else ahead


class LookAhead:
    """What a worker has foreseen.

    :param offers: to whom foreseen calls are offered.
    :param ranks: the other ranks, some of which may be busy; those that run a step with this one retract it too.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, offers: Offers, ranks: Ranks | None = None):
        self._engine, self._scheduler, self._offers, self._ranks = engine, scheduler, offers, ranks
        self._foreseeable: dict[CallOp, bool] = {}

    def foresee(self, flights: Sequence[Flight]) -> None:
        """Make ready what will follow the calls of *flights*, which still run."""
        for flight in flights:
            self._foresee(flight)

    def _foresee(self, flight: Flight) -> None:
        if flight.outcome is None:
            return
        again: list[CallRun] = []
        others: list[CallRun] = []
        for w, result in zip(flight.work, flight.outcome.results, strict=True):
            call, outputs = w.call, result.outputs
            if outputs is None or call.dropped or call.run.over:
                continue
            if call.again is not None:
                ahead = call.again.foresee(call, outputs)
            else:
                ahead = call.run.foresight.foresee(call, outputs, self._may)
            if ahead is None:
                continue
            if ahead.op is call.op and ahead.length == 1 and not (ahead.op.shaped or ahead.op.optional):
                again.append(ahead)
            else:
                others.append(ahead)
        now = time.monotonic()
        self._offers.offer_together(again, now)
        for ahead in others:
            self._offers.offer(ahead, now)

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
