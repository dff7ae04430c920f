"""How requests come to a worker: they are judged, queued, and begin when all that they need is reserved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mstar.engine.device import raise_if_lost
from mstar.graph.run import RequestRun
from mstar.scheduler.base import Scheduler, Ticket
from mstar.spec.deployment import Deployment
from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.request import EngineRequest, Event
from mstar.worker.admission import Admission, Holding
from mstar.worker.build import Built
from mstar.worker.live import Live
from mstar.worker.observers import Observers
from mstar.worker.profile import RequestProfile
from mstar.worker.requests import Requests
from mstar.worker.sessions import Sessions
from mstar.worker.sharing import PromptSharing
from mstar.worker.walks import Walks

__all__ = ["Arrivals"]

log = logging.getLogger(__name__)


class Arrivals:
    """The way of a request from its submission to the first of its routes.

    :param emit: takes the events of the requests that come.
    """

    def __init__(
        self,
        built: Built,
        deployment: Deployment,
        admission: Admission,
        sessions: Sessions,
        scheduler: Scheduler,
        requests: Requests,
        sharing: PromptSharing,
        walks: Walks,
        observers: Observers,
        emit: Callable[[Event], None],
    ):
        self._plan, self._model, self._device, self._dtype = built.plan, built.model, built.device, built.dtype
        self._deployment, self._admission, self._sessions, self._scheduler = deployment, admission, sessions, scheduler
        self._requests, self._sharing, self._walks = requests, sharing, walks
        self._observers, self._emit = observers, emit

    def submit(self, request: EngineRequest) -> None:
        """Queue *request*. Never raises for what the request is: a refusal is a ``Failed`` event."""
        now = time.monotonic()
        if request.id in self._requests.live:
            self._requests.refuse(
                request, RequestError(f"request id {request.id!r} is in use", param="id", code="duplicate_id")
            )
            return
        try:
            live = self._admit_later(request, now)
        except RequestError as error:
            self._requests.refuse(request, error)
        except Exception as error:
            raise_if_lost(error)
            log.exception("request %r could not be set up", request.id)
            self._requests.refuse(request, error)
        else:
            self._requests.add(live)

    def _admit_later(self, request: EngineRequest, now: float) -> Live:
        needs = self._admission.needs(request)
        run = RequestRun(self._plan, request, self._model.route, self._emit, self._device, self._dtype)
        timeout = self._deployment.request_timeout_s if request.timeout is None else request.timeout
        live = Live(request, run, Holding(needs), now, None if timeout is None else now + timeout)
        if request.profile:
            live.profile = RequestProfile(now)
        if request.session is not None:
            session = live.holding.session = self._sessions.acquire(request.session, request.id, now, request.tenant)
            live.fresh = not session.owners  # a context that goes on has no head to skip
        try:
            self._enqueue(Ticket(request.id, request.tenant, request.priority, now, live), now)
        except RequestError:
            self._requests.release(live, keep_session=True, now=now)
            raise
        return live

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        try:
            self._scheduler.submit(ticket)
        except TooBusy:
            # in a burst, the queue may be full of requests that need not wait: let them start first
            self.start(now)
            self._scheduler.submit(ticket)

    def start(self, now: float) -> None:
        """Begin the requests that can be admitted now, in the scheduler's order."""
        failed: list[tuple[Live, Exception]] = []

        def admit(ticket: Ticket) -> bool:
            live: Live = ticket.payload
            if self._requests.running >= self._deployment.max_concurrent_requests:
                return False
            try:
                if not self._admission.reserve(live.request, live.holding):
                    return False
            except Exception as error:
                raise_if_lost(error)
                if not isinstance(error, RequestError):
                    log.exception("request %r could not be admitted", live.request.id)
                failed.append((live, error))
                return True
            self._requests.start(live, now)
            return True

        for ticket in self._scheduler.start(admit):
            live: Live = ticket.payload
            if live.started is not None:
                self._begin(live)
        for live, error in failed:
            self._requests.fail(live, error)

    def _begin(self, live: Live) -> None:
        started = live.started or 0.0
        self._observers.call("mstar_request_started", request=live.request, queued_s=started - live.arrival)
        if not self._sharing.waits(live):
            self._walks.start(live)
