"""The requests of a worker between submission and end: which there are, what is theirs, and how they end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mstar.engine.device import raise_if_lost
from mstar.graph.calls import CallRun
from mstar.resources.base import Owner
from mstar.scheduler.base import Scheduler
from mstar.scheduler.deadlines import Deadlines
from mstar.spec.errors import RequestError
from mstar.spec.request import Done, EngineRequest, Event, Failed
from mstar.worker.admission import Admission
from mstar.worker.live import Live, failure
from mstar.worker.observers import Observers
from mstar.worker.ranks import Ranks
from mstar.worker.sessions import Sessions

__all__ = ["Requests"]

log = logging.getLogger(__name__)


class Requests:
    """Who runs or waits here. Ending one twice does nothing the second time.

    :param emit: takes the event that a request ends with. :param forget: called with each that ends, while it still
        holds what it held; *over* when it holds nothing any more.
    :ivar live: the requests by id. :ivar running: how many of them have started.
    """

    def __init__(
        self,
        admission: Admission,
        sessions: Sessions,
        scheduler: Scheduler,
        observers: Observers,
        emit: Callable[[Event], None],
        forget: Callable[[Live], None],
        over: Callable[[Live], None],
        ranks: Ranks | None,
    ):
        self._admission, self._sessions, self._scheduler = admission, sessions, scheduler
        self._observers, self._emit, self._forget, self._over, self._ranks = observers, emit, forget, over, ranks
        self.live: dict[str, Live] = {}
        self.running = 0
        self._timeouts: Deadlines[Live] = Deadlines()

    def add(self, live: Live) -> None:
        """*live* waits."""
        self.live[live.request.id] = live
        self._timeouts.add(live)
        self._observers.call("mstar_request_submitted", request=live.request)

    def start(self, live: Live, now: float) -> None:
        """*live* has what it needs and runs from *now* on."""
        live.started = now
        self.running += 1

    def of(self, call: CallRun) -> Live | None:
        """The request of *call*, unless it has ended."""
        return None if call.run.over else self.live[call.run.request.id]

    def answering(self, request: str) -> bool:
        """Whether it has a first token or other output."""
        live = self.live.get(request)
        return live is not None and live.answering

    # --- what is theirs -----------------------------------------------------------------------------------------------
    def owner_of(self, live: Live, resource: str, call: CallRun) -> Owner:
        """Whose state *call* uses in *resource*."""
        return self.owner(live, resource, call.op.call.context)

    def owner(self, live: Live, resource: str, context: str) -> Owner:
        """Whose state *live* uses in *resource* under the name *context*."""
        return self._admission.owner(resource, context, live.request.id, live.holding.session)

    def owners(self, resource: str) -> list[Owner]:
        """Who holds something of *resource* and is no session's."""
        found = []
        for live in self.live.values():
            held = live.holding.session.owners if live.holding.session is not None else set()
            found += [o for name, o in live.holding.owners if name == resource and (name, o) not in held]
        return found

    def release(self, live: Live, keep_session: bool, now: float) -> None:
        """Give back what *live* holds."""
        self._admission.release(live.holding)
        session = live.holding.session
        if session is not None:
            live.holding.session = None
            self._sessions.give_back(session, now, keep=keep_session)

    # --- how they end -------------------------------------------------------------------------------------------------
    def refuse(self, request: EngineRequest, error: Exception) -> None:
        """*request* is not to begin."""
        event = failure(request.id, error)
        self._emit(event)
        self._observers.call("mstar_request_refused", request=request, event=event)

    def finish(self, live: Live, reason: str | None = None) -> None:
        """*live* ends as it should; *reason* is found from how its loops ended, unless given."""
        if live.request.id in self.live:
            live.run.emissions.send_held()  # it counts as said
            self.end(live, live.done(reason), keep_session=True)

    def fail(self, live: Live, error: Exception) -> None:
        """*live* ends because of *error*."""
        # After a fault of ours nobody knows what the session's state holds; a client's mistake does not touch it.
        self.end(live, failure(live.request.id, error), keep_session=isinstance(error, RequestError))

    def fail_raised(self, live: Live, error: Exception) -> None:
        """*live*'s route or stream has raised *error*, which is being handled.

        :raises DeviceLost: that was the reason.
        """
        raise_if_lost(error)
        if not isinstance(error, RequestError):
            log.exception("request %r failed", live.request.id)
        self.fail(live, error)

    def fail_as(self, failed: Failed) -> None:
        """A request that is still there ends as another rank says."""
        live = self.live.get(failed.id)
        if live is not None:
            self.end(live, failed, keep_session=failed.code != "internal_error")

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        while (live := self._timeouts.first()) is not None and live.deadline is not None and live.deadline <= now:
            took = f"the request took longer than {live.deadline - live.arrival:.3g} s"
            self.fail(live, RequestError(took, code="timeout", status=504, type="server_error"))

    def next_expiry(self) -> float | None:
        """When the first runs out of time, in monotonic seconds."""
        first = self._timeouts.first()
        return None if first is None else first.deadline

    def end(self, live: Live, event: Done | Failed, keep_session: bool) -> None:
        """*live* ends with *event*, and everything that it holds is free again."""
        if self.live.pop(live.request.id, None) is None:
            return
        self._timeouts.discard(live)
        self._forget(live)
        self._scheduler.forget(live.request.id)
        if live.started is not None:
            self.running -= 1
        self.release(live, keep_session, time.monotonic())
        live.run.let_go()
        if self._ranks is not None:
            self._ranks.ended(live.request.id)
        if live.profile is not None:
            event.profile = live.profile.done(live.started)
        self._emit(event)
        self._observers.call("mstar_request_ended", request=live.request, event=event)
        self._over(live)
