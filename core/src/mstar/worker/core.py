"""The worker: requests in, events out, one step at a time.

One thread owns a worker and calls it; executors bring commands in and carry events out (:mod:`mstar.cluster`). The loop
is plain: choose a batch, launch it, land it, route its outputs.

*Look-ahead* (``engine.lookahead``) puts the next batch's launch before the landing, so that the device always has a
step to go on with: :mod:`mstar.worker.lookahead`. What a client sees is the same; the plain loop is the oracle of the
overlapped one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.device import raise_if_lost
from mstar.engine.engine import Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.graph.run import RequestRun
from mstar.registry import Registry
from mstar.resources.base import Owner
from mstar.scheduler.base import Ticket
from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.request import Cancel, EngineRequest, Event, Push
from mstar.worker.admission import Admission, Holding
from mstar.worker.build import build
from mstar.worker.elsewhere import Elsewhere
from mstar.worker.equip import equip, warm_up
from mstar.worker.layout import Meshes
from mstar.worker.live import Live
from mstar.worker.lookahead import LookAhead, looks_ahead
from mstar.worker.messages import FromRank
from mstar.worker.moves import Moves
from mstar.worker.observers import Observers
from mstar.worker.offers import Offers
from mstar.worker.portions import Portions
from mstar.worker.profile import RequestProfile, StepTotals, device_memory
from mstar.worker.rank_links import Peer
from mstar.worker.ranks import coordinate
from mstar.worker.requests import Requests
from mstar.worker.sessions import Sessions
from mstar.worker.sharing import PromptSharing
from mstar.worker.trace import open_trace
from mstar.worker.walks import Walks

__all__ = ["Worker"]

log = logging.getLogger(__name__)

_OBSERVERS = (
    "mstar_request_submitted",
    "mstar_request_refused",
    "mstar_request_started",
    "mstar_request_ended",
    "mstar_step_done",
)


class Worker:
    """One model on one rank. See :class:`mstar.cluster.base.Executor` for how it is driven.

    :param on_phase: told of loading progress. Construction returns when the model is ready.
    :param meshes: of the nodes that this rank computes together with others. Workers of one mesh get the same requests
        in the same order between the same steps, with a seed where they sample.
    """

    def __init__(
        self,
        config: WorkerConfig,
        registry: Registry,
        on_phase: Callable[[Phase], None] = lambda _: None,
        meshes: Meshes | None = None,
    ):
        deployment = config.deployment
        built = build(config, registry, on_phase, meshes)
        self.config = config
        self.observers = Observers(registry.plugins, *_OBSERVERS)
        self.plan, self.resources = built.plan, built.resources
        self._model, self._device, self._dtype = built.model, built.device, built.dtype
        self.ranks = coordinate(built, config, registry)
        if self.ranks is not None:
            self.resources = self.ranks.books
        self.sessions = Sessions(deployment.max_sessions, deployment.session_ttl_s, self._close, self._session_dropped)
        self.admission = Admission(built.model, built.plan, self.resources, self.sessions, self.ranks)
        limits = {n.name: n.max_rows for n in built.plan.graph.nodes}
        device = built.device.type
        sizes = {
            "max_step_tokens": deployment.scheduler.step_tokens(device),
            "max_mixed_rows": deployment.scheduler.mixed_rows(device),
        }
        self.scheduler = registry.scheduler(deployment.scheduler.policy)(
            deployment.scheduler.model_copy(update=sizes),
            group_limits=lambda group: limits.get(group[0]),
        )
        self._events: list[Event] = []
        self.requests = Requests(
            self.admission,
            self.sessions,
            self.scheduler,
            self.observers,
            self._events.append,
            self._forget,
            self._over,
            self.ranks,
        )
        self.engine = equip(built, config, registry, self._owner, self._step_done)
        self._totals, self._began = StepTotals(built.plan), time.time()
        self._steps_watched = self.observers.watched("mstar_step_done")
        warm_up(self.engine, built, config, on_phase)
        self.trace = self.engine.trace = open_trace(deployment.engine.trace, config.key, built.device, built.resources)
        self.observers.add("timeline", self.trace)
        self._lookahead = looks_ahead(deployment, built.device)
        self._flights: list[Flight] = []
        self.sharing = PromptSharing(
            built.plan,
            self.resources,
            self.requests.live,
            self.requests.owner_of,
            lambda live: self.walks.start(live),
            self.ranks,
        )
        self.moves: Moves | None = None
        if self.ranks is not None and self.ranks.layout.by_walk:
            self.moves = Moves(
                self.ranks, built.resources, built.device, lambda *call: self.walks.come(*call), self.requests.fail
            )
        self.portions = Portions(self.resources, self._owner_of_call)
        self.offers = Offers(
            self.scheduler,
            self.sharing,
            self.portions,
            self.requests.of,
            lambda *call: self.walks.complete(*call),
            self.ranks,
        )
        self.ahead = LookAhead(self.engine, self.scheduler, self.offers, self.ranks)
        self.walks = Walks(
            self.requests,
            self.resources,
            self.sharing,
            self.portions,
            self.offers,
            self.ahead,
            self.moves,
            self.ranks,
        )
        self._may_run = None if self.ranks is None else self.ranks.steps.may_run_here
        self._elsewhere = self._with_others()
        self._next_check = time.monotonic()
        self._checked = False

    def _with_others(self) -> Elsewhere | None:
        if self.ranks is None:
            return None
        return Elsewhere(
            self.ranks,
            self.requests,
            self.sessions,
            self.sharing,
            self.moves,
            self.offers,
            self.walks.found,
            self._under_way,
            self._go_on,
            self._step_done,
        )

    # --- commands -----------------------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        """Queue *request*. Never raises for what the request is: a refusal is a ``Failed`` event."""
        now = time.monotonic()
        if request.id in self.requests.live:
            self.requests.refuse(
                request, RequestError(f"request id {request.id!r} is in use", param="id", code="duplicate_id")
            )
            return
        try:
            live = self._admit_later(request, now)
        except RequestError as error:
            self.requests.refuse(request, error)
        except Exception as error:
            raise_if_lost(error)
            log.exception("request %r could not be set up", request.id)
            self.requests.refuse(request, error)
        else:
            self.requests.add(live)

    def _admit_later(self, request: EngineRequest, now: float) -> Live:
        needs = self.admission.needs(request)
        run = RequestRun(self.plan, request, self._model.route, self._events.append, self._device, self._dtype)
        timeout = self.config.deployment.request_timeout_s if request.timeout is None else request.timeout
        live = Live(request, run, Holding(needs), now, None if timeout is None else now + timeout)
        if request.profile:
            live.profile = RequestProfile(now)
        if request.session is not None:
            session = live.holding.session = self.sessions.acquire(request.session, request.id, now, request.tenant)
            live.fresh = not session.owners  # a context that goes on has no head to skip
        try:
            self._enqueue(Ticket(request.id, request.tenant, request.priority, now, live), now)
        except RequestError:
            self.requests.release(live, keep_session=True, now=now)
            raise
        return live

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        try:
            self.scheduler.submit(ticket)
        except TooBusy:
            # in a burst, the queue may be full of requests that need not wait: let them start first
            self._start_requests(now)
            self.scheduler.submit(ticket)

    def push(self, push: Push) -> None:
        live = self.requests.live.get(push.id)
        if live is None:
            return  # it has ended; its end is on the way to the client
        self.walks.guarded(live, live.run.push, push)

    def cancel(self, cancel: Cancel) -> None:
        live = self.requests.live.get(cancel.id)
        if live is not None:
            self.requests.finish(live, cancel.reason)

    def ack(self, request: str, stream: str, items: int) -> None:
        live = self.requests.live.get(request)
        if live is not None:
            self.walks.guarded(live, live.run.ack, stream, items)

    # --- the loop -----------------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Admit what can be admitted and run one batch. ``False`` when nothing was ready."""
        trace = self.trace
        trace.begin()
        now = time.monotonic()
        self.requests.expire(now)
        self.sessions.expire(now)
        if self.ranks is not None:
            self.ranks.steps.check_doubts(now)
        if self.scheduler.waiting:
            self._start_requests(now)
        trace.stage("admit")
        moved = self.moves is not None and self.moves.step()
        sent = (self._elsewhere is not None and self._elsewhere.send_steps(now)) or moved
        work = self.offers.next_work(now, self._may_run)
        if not work and not self._flights:
            if sent or (self.ranks is not None and self.ranks.hurries):
                return True
            trace.rest(self.requests.running, self.scheduler.waiting)
            self._idle(now)
            return False
        trace.stage("schedule")
        self._checked = False
        if work and self.ranks is not None:
            self.ranks.steps.dispatch(work)  # a mesh runs it with this rank
        launched = self._launch(work) if work else []
        landing = self._flights if self._lookahead else launched
        self._flights = launched if self._lookahead else []
        landed = [self._land(flight) for flight in landing]  # all parts of a step that failed before what follows
        for flight, results in zip(landing, landed, strict=True):
            self._route(flight, results)
        self.ahead.foresee(self._flights)
        trace.stage("foresee")
        trace.end(self.requests.running, self.scheduler.waiting, self.requests.answering)
        return True

    def events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._events[:] = self._events[:], []
        if self.ranks is not None:
            self.ranks.flush()
        return events

    def next_deadline(self) -> float | None:
        """Until when (monotonic seconds) an idle worker may sleep."""
        times = [self.requests.next_expiry(), self.sessions.next_expiry()]
        if not self._checked:
            times.append(self._next_check)
        if self._elsewhere is not None:
            times.append(self._elsewhere.next_look())
        return min((t for t in times if t is not None), default=None)

    def status(self) -> dict[str, Any]:
        return {
            "running": self.requests.running,
            "waiting": self.scheduler.waiting,
            "sessions": len(self.sessions),
            "steps": self.engine.steps,
            "engine": self.engine.runner.status(),
            "resources": {name: resource.usage()._asdict() for name, resource in self.resources.items()},
            "ranks": [] if self.ranks is None else self.ranks.status(),
            "moves": {} if self.moves is None else self.moves.status(),
            "checkpoints": {name: counts for name, r in self.resources.items() if (counts := r.checkpoint_counts())},
            "began": self._began,
            "entries": self._totals.report(),
            "prefix": {"tokens": self.sharing.looked_up, "hits": self.sharing.found},
            "media": self._media_lookups(),
            "memory": dict(device_memory(self._device)),
            "observer_failures": self.observers.report(),
        }

    def _media_lookups(self) -> dict[str, int]:
        found = [pair for resource in self.resources.values() if (pair := resource.lookups()) is not None]
        if not found:
            return {}
        return {"embeddings": sum(asked for asked, _ in found), "hits": sum(hits for _, hits in found)}

    def close(self) -> None:
        """End every request with an error and free everything."""
        for live in list(self.requests.live.values()):
            self.requests.fail(live, RequestError("the server is shutting down", code="shutting_down", status=503))
        self._flights.clear()
        self.sessions.close()
        self.trace.rest(self.requests.running, self.scheduler.waiting)
        self.trace.close()

    # --- requests begin -----------------------------------------------------------------------------------------------
    def _start_requests(self, now: float) -> None:
        failed: list[tuple[Live, Exception]] = []

        def admit(ticket: Ticket) -> bool:
            live: Live = ticket.payload
            if self.requests.running >= self.config.deployment.max_concurrent_requests:
                return False
            try:
                if not self.admission.reserve(live.request, live.holding):
                    return False
            except Exception as error:
                raise_if_lost(error)
                failed.append((live, error))
                return True
            self.requests.start(live, now)
            return True

        for ticket in self.scheduler.start(admit):
            live: Live = ticket.payload
            if live.started is not None:
                self._begin(live)
        for live, error in failed:
            self.requests.fail(live, error)

    def _begin(self, live: Live) -> None:
        started = live.started or 0.0
        self.observers.call("mstar_request_started", request=live.request, queued_s=started - live.arrival)
        if not self.sharing.waits(live):
            self.walks.start(live)

    # --- steps --------------------------------------------------------------------------------------------------------
    def _launch(self, work: list[Work]) -> list[Flight]:
        flights = self.engine.launch(work)
        if self.ranks is not None:
            self.ranks.steps.launched(flights)
        now = time.monotonic()
        for flight in flights:
            self._launched(flight, now)
        self.trace.stage("schedule")
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
                self._under_way(w, rows, began, now)

    def _under_way(self, w: Work, rows: int, began: float, now: float) -> None:
        """*w* is in a step of *rows* rows that began at *began* (monotonic seconds), here or on another rank."""
        call = w.call
        live = self.requests.live[call.run.request.id]
        call.item = None
        call.done += w.tokens
        call.chunks += 1
        if live.profile is not None:
            live.profile.launched(call.op.call.node, call.op.entry.name, w.tokens, rows, began)
        if not w.complete:
            self.offers.offer(call, now)
        elif live.fresh and call.op.entry.prefix:
            self.sharing.computed(live)

    def _land(self, flight: Flight) -> list[RowResult | Exception]:
        results = self.engine.land(flight)
        if self.ranks is not None and flight.step:
            self.ranks.steps.landed_here(flight, results)
        self.trace.landed(flight)
        return results

    def _route(self, flight: Flight, results: list[RowResult | Exception]) -> None:
        if flight.unknown:
            self._learn(flight, results)
        for w, result in zip(flight.work, results, strict=True):
            call = w.call
            if call.run.over or call.dropped:
                continue  # it has ended, or this step should not have been
            if isinstance(result, RowResult):
                self._go_on(w, call, result)
            else:
                self.requests.fail(self.requests.live[call.run.request.id], result)
        for w in flight.work:  # a step's outputs go with the last who needs them, not with the garbage collector
            call = w.call
            if call.flight is flight:
                call.flight = None
        self.trace.routed(flight)

    def _learn(self, flight: Flight, results: list[RowResult | Exception]) -> None:
        """Tell the resources ids that were not known when *flight* was launched, of the rows that go on."""
        calls = [w.call for w in flight.work]
        going = [
            i
            for i in flight.unknown
            if isinstance(results[i], RowResult) and not (calls[i].run.over or calls[i].dropped)
        ]
        told = self.engine.learn(flight, going)
        if self.ranks is None:
            return
        for index, ids in told:
            live = self.requests.live[calls[index].run.request.id]
            for resource in flight.learners:
                self.ranks.learn(resource.name, self.requests.owner_of(live, resource.name, calls[index]), ids)

    def _go_on(self, w: Work, call: CallRun, result: RowResult) -> None:
        run, outputs = call.run, result.outputs
        if run.request.profile and (profile := self.requests.live[run.request.id].profile) is not None:
            profile.landed(call.op.call.node, call.op.entry.name)
        if not w.complete:
            return
        assert outputs is not None
        try:
            if call.again is None or not call.again.round(call, outputs):
                run.complete(call, outputs, result.logprobs)
            if run.ready or run.void or run.taken_back or run.finished:
                self.walks.collect(self.requests.live[run.request.id])
        except Exception as error:
            self.requests.fail_raised(self.requests.live[run.request.id], error)

    # --- other ranks --------------------------------------------------------------------------------------------------
    def link(self, rank: int, peer: Peer, facts: Mapping[str, Any]) -> None:
        """Another rank of the layout is ready; *peer* is the way to it."""
        assert self._elsewhere is not None
        self._elsewhere.link(rank, peer, facts)

    def unlink(self, rank: int, reason: str) -> None:
        """Another rank has died."""
        assert self._elsewhere is not None
        self._elsewhere.unlink(rank, reason)

    def take(self, message: FromRank) -> None:
        """What another rank sent."""
        assert self._elsewhere is not None
        self._elsewhere.take(message)

    def _forget(self, live: Live) -> None:
        if self.moves is not None:
            self.moves.forget(live)

    def _over(self, live: Live) -> None:
        self.sharing.computed(live)  # or it never will be: siblings go on

    def _step_done(self, node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
        self._totals.add(node, entry, rows, tokens, seconds)
        if self._steps_watched:
            self.observers.call("mstar_step_done", node=node, entry=entry, rows=rows, tokens=tokens, seconds=seconds)

    # --- books --------------------------------------------------------------------------------------------------------
    def _owner(self, work: Work, resource: str) -> Owner:
        return self._owner_of_call(work.call, resource)

    def _owner_of_call(self, call: CallRun, resource: str) -> Owner:
        return self.requests.owner_of(self.requests.live[call.run.request.id], resource, call)

    def _close(self, resource: str, owner: Owner) -> None:
        if self.ranks is not None:
            self.ranks.closing([(resource, owner)])
        self.resources[resource].close(owner)

    def _session_dropped(self, key: str) -> None:
        if self.ranks is not None:
            self.ranks.seats.forget(key)

    def _idle(self, now: float) -> None:
        if now >= self._next_check and not self._checked:
            self._next_check = now + self.config.deployment.engine.idle_check_s
            self.check()
            self._checked = True

    def check(self) -> None:
        """Raise :class:`~mstar.resources.base.IntegrityError` if a pool's books do not balance."""
        for name, resource in self.resources.items():
            resource.check([*self.sessions.open_owners(name), *self.requests.owners(name)])
