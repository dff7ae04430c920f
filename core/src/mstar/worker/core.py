"""The worker: requests in, events out, one step at a time.

One thread owns a worker and calls it; executors bring commands in and carry events out (:mod:`mstar.cluster`). The loop
is plain: choose a batch, launch it, land it, route its outputs.

*Look-ahead* (``engine.lookahead``) puts the next batch's launch before the landing, so that the device always has a
step to go on with: :mod:`mstar.worker.lookahead`. What a client sees is the same; the plain loop is the oracle of the
overlapped one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.step import Work
from mstar.graph.calls import CallRun
from mstar.registry import Registry
from mstar.resources.base import Owner
from mstar.spec.errors import RequestError
from mstar.spec.request import Cancel, EngineRequest, Event, Push
from mstar.worker.admission import Admission
from mstar.worker.arrivals import Arrivals
from mstar.worker.build import build
from mstar.worker.elsewhere import Elsewhere
from mstar.worker.equip import equip, scheduler_of, warm_up
from mstar.worker.flights import Flights
from mstar.worker.layout import Meshes
from mstar.worker.live import Live
from mstar.worker.lookahead import LookAhead, looks_ahead
from mstar.worker.messages import FromRank
from mstar.worker.moves import Moves
from mstar.worker.observers import Observers
from mstar.worker.offers import Offers
from mstar.worker.portions import Portions
from mstar.worker.profile import StepTotals, device_memory
from mstar.worker.rank_links import Peer
from mstar.worker.ranks import coordinate
from mstar.worker.requests import Requests
from mstar.worker.sessions import Sessions
from mstar.worker.sharing import PromptSharing
from mstar.worker.trace import open_trace
from mstar.worker.walks import Walks

__all__ = ["Worker"]

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
        self.config, self.plan, self._model, self._device = config, built.plan, built.model, built.device
        self.ranks = ranks = coordinate(built, config, registry)
        self.resources = resources = built.resources if ranks is None else ranks.books
        self.observers = observers = Observers(registry.plugins, *_OBSERVERS)
        self._events: list[Event] = []
        emit = self._events.append

        self.sessions = sessions = Sessions(
            deployment.max_sessions, deployment.session_ttl_s, self._close, self._session_dropped
        )
        self.admission = Admission(built.model, built.plan, resources, sessions, ranks)
        self.scheduler = scheduler = scheduler_of(built, deployment, registry)
        self.requests = requests = Requests(
            self.admission, sessions, scheduler, observers, emit, self._forget, self._over, ranks
        )

        self.engine = engine = equip(built, config, registry, self._owner, self._step_done)
        self._totals, self._began = StepTotals(built.plan), time.time()
        self._steps_watched = observers.watched("mstar_step_done")
        warm_up(engine, built, config, on_phase)
        engine.trace = open_trace(deployment.engine.trace, config.key, built.device, built.resources)
        observers.add("timeline", engine.trace)

        self.sharing = sharing = PromptSharing(
            built.plan, resources, requests.live, requests.owner_of, lambda live: self.walks.start(live), ranks
        )
        self.moves = moves = None
        if ranks is not None and ranks.layout.by_walk:
            self.moves = moves = Moves(
                ranks, built.resources, built.device, lambda *call: self.walks.come(*call), requests.fail
            )
        self.portions = Portions(resources, self._owner_of_call)
        self.offers = offers = Offers(
            scheduler, sharing, self.portions, requests.of, lambda *call: self.walks.complete(*call), ranks
        )
        self.ahead = LookAhead(engine, scheduler, offers, ranks)
        self.walks = Walks(requests, resources, sharing, self.portions, offers, self.ahead, moves, ranks)
        self._flights = flights = Flights(
            engine, requests, sharing, offers, self.ahead, self.walks, ranks, looks_ahead(deployment, built.device)
        )
        self._arrivals = Arrivals(
            built, deployment, self.admission, sessions, scheduler, requests, sharing, self.walks, observers, emit
        )
        self._may_run, self._elsewhere = None, None
        if ranks is not None:
            self._may_run = ranks.steps.may_run_here
            self._elsewhere = Elsewhere(
                ranks, requests, sessions, sharing, moves, offers, self.walks.found, flights, self._step_done
            )
        self._next_check = time.monotonic()
        self._checked = False

    # --- commands -----------------------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        """Queue *request*. Never raises for what the request is: a refusal is a ``Failed`` event."""
        self._arrivals.submit(request)

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
        trace = self.engine.trace
        trace.begin()
        now = time.monotonic()
        self.requests.expire(now)
        self.sessions.expire(now)
        if self.ranks is not None:
            self.ranks.steps.check_doubts(now)
        if self.scheduler.waiting:
            self._arrivals.start(now)
        trace.stage("admit")
        moved = self.moves is not None and self.moves.step()
        sent = (self._elsewhere is not None and self._elsewhere.send_steps(now)) or moved
        work = self.offers.next_work(now, self._may_run)
        if not work and not self._flights.flying:
            if sent or (self.ranks is not None and self.ranks.hurries):
                return True
            trace.rest(self.requests.running, self.scheduler.waiting)
            self._idle(now)
            return False
        trace.stage("schedule")
        self._checked = False
        self._flights.step(work)
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
        self._flights.flying.clear()
        self.sessions.close()
        self.engine.trace.rest(self.requests.running, self.scheduler.waiting)
        self.engine.trace.close()

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
