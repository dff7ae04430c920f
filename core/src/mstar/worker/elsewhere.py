"""A worker and the other ranks of its layout: steps that they run for it, what they say, and what their death ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mstar.graph.calls import CallRun
from mstar.spec.request import Failed
from mstar.worker.flights import Flights
from mstar.worker.live import Live, failure
from mstar.worker.messages import Exported, Found, FromRank, Landed, Met, Refused
from mstar.worker.moves import Moves
from mstar.worker.offers import Offers
from mstar.worker.rank_links import Peer, RankLost
from mstar.worker.rank_steps import Landing
from mstar.worker.ranks import Ranks
from mstar.worker.requests import Requests
from mstar.worker.sessions import Sessions
from mstar.worker.sharing import PromptSharing

__all__ = ["Elsewhere"]


class Elsewhere:
    """What rank 0's worker does because of the others.

    :param run: lets a call run whose prompt another rank has looked for. :param flights: the steps of this rank, which
        are told of each row of a step that others run, and of its result. :param step_done: told of node, entry, rows,
        items and seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        requests: Requests,
        sessions: Sessions,
        sharing: PromptSharing,
        moves: Moves | None,
        offers: Offers,
        run: Callable[[Live, CallRun], None],
        flights: Flights,
        step_done: Callable[[str, str, int, int, float], None],
    ):
        self._ranks, self._requests, self._sessions = ranks, requests, sessions
        self._sharing, self._moves, self._offers = sharing, moves, offers
        self._run, self._flights, self._step_done = run, flights, step_done

    def link(self, rank: int, peer: Peer, facts: Mapping[str, Any]) -> None:
        """Another rank of the layout is ready; *peer* is the way to it."""
        self._ranks.link(rank, peer, facts)

    def unlink(self, rank: int, reason: str) -> None:
        """Another rank has died: the requests that cannot go on without it end, and the sessions that it kept state
        of."""
        error, requests = RankLost(rank, reason), self._requests
        holding = {name: live.holding.owners for name, live in requests.live.items()}
        for request in self._ranks.lost(rank, holding):
            live = requests.live.get(request)
            if live is not None:
                requests.end(live, failure(request, error), keep_session=False)
        lost = partial(self._ranks.at, rank)
        self._sessions.drop_where(lost)
        for live in list(requests.live.values()):  # those that wait with a session whose state was there
            session = live.holding.session
            if session is not None and any(lost(resource, owner) for resource, owner in session.owners):
                requests.end(live, failure(live.request.id, error), keep_session=False)

    def take(self, message: FromRank) -> None:
        """What another rank sent."""
        message = self._ranks.resolve(message)
        if isinstance(message, Exported):
            if self._moves is not None:
                self._moves.take(message)
        elif isinstance(message, Found):
            if (asked := self._sharing.found_elsewhere(message)) is not None:
                self._run(*asked)
        elif isinstance(message, Met):
            self._ranks.met(message)
        elif isinstance(message, Refused):
            self._requests.fail_as(message.failed)
        elif isinstance(message, Landed) and (landing := self._ranks.steps.take(message)) is not None:
            self._route(landing)  # what is Fetched, a route has given up waiting for

    def send_steps(self, now: float) -> bool:
        """Take what has come from other ranks, and give work to every one that has room: before this one does its own,
        which may take a while. Returns whether there was any."""
        ranks = self._ranks
        for message in ranks.values.stashed():
            self.take(message)
        ranks.look()
        sent = False
        for landing in ranks.steps.arrived():
            self._route(landing)
            sent = True
        while work := self._offers.next_work(now, ranks.steps.may_run_elsewhere):
            ranks.steps.dispatch(work)
            for w in work:
                self._flights.under_way(w, len(work), now, now)
            sent = True
        return sent

    def _route(self, landing: Landing) -> None:
        for w, result in zip(landing.work, landing.results, strict=True):
            if w.call.run.over:
                continue
            if isinstance(result, Failed):
                self._requests.fail_as(result)
            else:
                self._flights.go_on(w, w.call, result)
        call = landing.work[0].call.op
        tokens = sum(w.tokens for w in landing.work)
        self._step_done(call.call.node, call.entry.name, len(landing.work), tokens, landing.seconds)

    def next_look(self) -> float | None:
        """When something is to be looked at again, in monotonic seconds."""
        if self._ranks.busy or (self._moves is not None and self._moves.waits_for_device):
            return time.monotonic()
        return self._ranks.steps.next_doubt()
