"""Requests on their walks: what their routes and streams do runs inside one guard, and what comes of it is seen to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from mstar.graph.calls import CallRun
from mstar.resources.base import Resource, Row
from mstar.worker.live import Live
from mstar.worker.lookahead import LookAhead
from mstar.worker.moves import Moves
from mstar.worker.offers import Offers
from mstar.worker.portions import Portions
from mstar.worker.ranks import Ranks
from mstar.worker.requests import Requests
from mstar.worker.sharing import PromptSharing

__all__ = ["Walks"]


class Walks:
    """Runs what a request has of code, and takes from it what is ready, and what is not to be.

    :param moves: state that is to come from another rank before a call; *ranks*: those that take back what this one
        does.
    """

    def __init__(
        self,
        requests: Requests,
        resources: Mapping[str, Resource],
        sharing: PromptSharing,
        portions: Portions,
        offers: Offers,
        ahead: LookAhead,
        moves: Moves | None,
        ranks: Ranks | None,
    ):
        self._requests, self._resources, self._sharing, self._portions = requests, resources, sharing, portions
        self._offers, self._ahead, self._moves, self._ranks = offers, ahead, moves, ranks

    def guarded(self, live: Live, action: Callable[..., None], *args: Any) -> None:
        """Run a route or a stream operation of *live*; what it raises ends that request only, unless the device is
        lost."""
        try:
            action(*args)
            self.collect(live)
        except Exception as error:
            self._requests.fail_raised(live, error)

    def start(self, live: Live) -> None:
        """*live*'s routes begin."""
        self.guarded(live, live.run.start)

    def complete(self, live: Live, call: CallRun) -> None:
        """Nothing of *call* is left to compute."""
        self.guarded(live, live.run.complete, call, {})

    def come(self, live: Live, call: CallRun) -> None:
        """*call*'s state has come to where it runs."""
        self.guarded(live, lambda: self._make_ready(live, call, time.monotonic()))

    def found(self, live: Live, call: CallRun) -> None:
        """Another rank has looked for what is known of *call*'s prompt."""
        self.guarded(live, lambda: self._let_run(live, call, time.monotonic()))

    def collect(self, live: Live) -> None:
        """Hand newly ready calls to the scheduler; end the request if nothing is left to do."""
        run = live.run
        if run.void:
            void, run.void = run.void, []
            for call in void:
                self._ahead.drop(call)
        if run.taken_back:
            taken_back, run.taken_back = run.taken_back, []
            for name, context, tokens in taken_back:
                owner = self._requests.owner(live, name, context)
                if self._ranks is None or self._ranks.rewind(name, owner, tokens):
                    self._resources[name].retract(Row(owner, tokens))
        while run.ready:
            now = time.monotonic()
            ready, run.ready = run.ready, []
            for call in ready:
                if self._moves is None or not self._moves.holds(live, call):
                    self._make_ready(live, call, now)
        if run.finished and live.started is not None:
            self._requests.finish(live)

    def _make_ready(self, live: Live, call: CallRun, now: float) -> None:
        if call.op.entry.prefix and live.fresh and call.done == 0 and not self._sharing.reuse(live, call):
            return
        self._let_run(live, call, now)

    def _let_run(self, live: Live, call: CallRun, now: float) -> None:
        if self._known(live, call):
            live.run.complete(call, {})
        else:
            self._offers.offer(call, now)

    def _known(self, live: Live, call: CallRun) -> bool:
        """Whether nothing of *call* needs to be computed."""
        if not self._portions.concern(call.op) or (self._ranks is not None and not self._ranks.here(call)):
            return False
        self._sharing.reuse_ahead(live, call)
        return self._portions.skip(call)
