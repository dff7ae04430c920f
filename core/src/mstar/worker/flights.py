"""The steps of a worker: launched, landed, and their results given to the walks that wait for them.

With look-ahead a step is launched before the one before it lands, and what follows it is foreseen
(:mod:`mstar.worker.lookahead`); without, it lands at once.
"""

from __future__ import annotations

import time

from mstar.engine.engine import Engine, Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.worker.lookahead import LookAhead
from mstar.worker.offers import Offers
from mstar.worker.ranks import Ranks
from mstar.worker.requests import Requests
from mstar.worker.sharing import PromptSharing
from mstar.worker.walks import Walks

__all__ = ["Flights"]


class Flights:
    """Runs steps on a worker's engine and routes what they come to.

    :param looks_ahead: whether a step lands only when the next one has been launched.
    :param ranks: the other ranks, some of which run steps with this one.
    :ivar flying: what has been launched and has not landed.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        sharing: PromptSharing,
        offers: Offers,
        ahead: LookAhead,
        walks: Walks,
        ranks: Ranks | None,
        looks_ahead: bool,
    ):
        self._engine, self._requests, self._sharing, self._offers = engine, requests, sharing, offers
        self._ahead, self._walks, self._ranks, self._looks_ahead = ahead, walks, ranks, looks_ahead
        self.flying: list[Flight] = []

    def step(self, work: list[Work]) -> None:
        """Launch *work*, if there is any; land what is to land now, and route its results."""
        if work and self._ranks is not None:
            self._ranks.steps.dispatch(work)  # a mesh runs it with this rank
        launched = self._launch(work) if work else []
        landing = self.flying if self._looks_ahead else launched
        self.flying = launched if self._looks_ahead else []
        landed = [self._land(flight) for flight in landing]  # all parts of a step that failed before what follows
        for flight, results in zip(landing, landed, strict=True):
            self._route(flight, results)
        self._ahead.foresee(self.flying)
        self._engine.trace.stage("foresee")

    def _launch(self, work: list[Work]) -> list[Flight]:
        flights = self._engine.launch(work)
        if self._ranks is not None:
            self._ranks.steps.launched(flights)
        now = time.monotonic()
        for flight in flights:
            self._launched(flight, now)
        self._engine.trace.stage("schedule")
        return flights

    def _launched(self, flight: Flight, now: float) -> None:
        if flight.failure is not None:
            for w in flight.work:  # the scheduler has it no more: if it should not have been, there is nothing to drop
                w.call.flight = flight
            return
        rows, began = len(flight.work), now - (time.perf_counter() - flight.began)
        for index, w in enumerate(flight.work):
            call = w.call
            call.flight, call.index = flight, index
            if w.again and not call.run.request.profile:  # nobody waits for it but its request
                call.done = call.chunks = 1
            else:
                self.under_way(w, rows, began, now)

    def under_way(self, w: Work, rows: int, began: float, now: float) -> None:
        """*w* is in a step of *rows* rows that began at *began* (monotonic seconds), here or on another rank."""
        call = w.call
        live = self._requests.live[call.run.request.id]
        call.item = None
        call.done += w.tokens
        call.chunks += 1
        if live.profile is not None:
            live.profile.launched(call.op.call.node, call.op.entry.name, w.tokens, rows, began)
        if not w.complete:
            self._offers.offer(call, now)
        elif live.fresh and call.op.entry.prefix:
            self._sharing.computed(live)

    def _land(self, flight: Flight) -> list[RowResult | Exception]:
        results = self._engine.land(flight)
        if self._ranks is not None and flight.step:
            self._ranks.steps.landed_here(flight, results)
        self._engine.trace.landed(flight)
        return results

    def _route(self, flight: Flight, results: list[RowResult | Exception]) -> None:
        if flight.unknown:
            self._learn(flight, results)
        for w, result in zip(flight.work, results, strict=True):
            call = w.call
            if call.run.over or call.dropped:
                continue  # it has ended, or this step should not have been
            if isinstance(result, RowResult):
                self.go_on(w, call, result)
            else:
                self._requests.fail(self._requests.live[call.run.request.id], result)
        for w in flight.work:  # a step's outputs go with the last who needs them, not with the garbage collector
            call = w.call
            if call.flight is flight:
                call.flight = None
        self._engine.trace.routed(flight)

    def _learn(self, flight: Flight, results: list[RowResult | Exception]) -> None:
        """Tell the resources ids that were not known when *flight* was launched, of the rows that go on."""
        calls = [w.call for w in flight.work]
        going = [
            i
            for i in flight.unknown
            if isinstance(results[i], RowResult) and not (calls[i].run.over or calls[i].dropped)
        ]
        told = self._engine.learn(flight, going)
        if self._ranks is None:
            return
        for index, ids in told:
            live = self._requests.live[calls[index].run.request.id]
            for resource in flight.learners:
                self._ranks.learn(resource.name, self._requests.owner_of(live, resource.name, calls[index]), ids)

    def go_on(self, w: Work, call: CallRun, result: RowResult) -> None:
        """*w*, a share of *call*, has come to *result*, here or on another rank."""
        run, outputs = call.run, result.outputs
        if run.request.profile and (profile := self._requests.live[run.request.id].profile) is not None:
            profile.landed(call.op.call.node, call.op.entry.name)
        if not w.complete:
            return
        assert outputs is not None
        try:
            if call.again is None or not call.again.round(call, outputs):
                run.complete(call, outputs, result.logprobs)
            if run.ready or run.void or run.taken_back or run.finished:
                self._walks.collect(self._requests.live[run.request.id])
        except Exception as error:
            self._requests.fail_raised(self._requests.live[run.request.id], error)
