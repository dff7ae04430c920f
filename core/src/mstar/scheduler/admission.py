"""The queue of requests that wait for admission. No torch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from mstar.scheduler.base import Ticket
from mstar.scheduler.levels import Levels
from mstar.spec.errors import TooBusy

__all__ = ["AdmissionQueue", "CompletionRate"]

Line = OrderedDict[str, Ticket]
Lane = OrderedDict[str, Line]


class CompletionRate:
    """How many requests end per second, over the last *window* of them."""

    def __init__(self, window: int = 64):
        self._ends: deque[float] = deque(maxlen=window)

    def record(self, now: float) -> None:
        self._ends.append(now)

    def restart(self) -> None:
        """Forget what was measured: an idle time says nothing about how fast requests end."""
        self._ends.clear()

    def at(self, now: float) -> float | None:
        """Requests per second up to *now*; ``None`` before two of them have ended. Falls while nothing ends."""
        if len(self._ends) < 2:
            return None
        return (len(self._ends) - 1) / max(now - self._ends[0], 1e-3)


class AdmissionQueue:
    """Bounded. Higher priorities first; within a priority the tenants take turns; within a tenant first come, first
    served. Every operation costs the same however long the queue is (lines are linked lists that can drop any entry).

    :param limit: the most tickets that may wait. At least one may, since every request passes through the queue.
    :param by_tenant: ``False`` puts all tenants in one line.
    """

    #: seconds; the bounds of the advice to a client that was turned away
    MIN_RETRY, MAX_RETRY = 1.0, 120.0

    def __init__(self, limit: int, by_tenant: bool = True):
        self.limit = max(1, limit)
        self.by_tenant = by_tenant
        self._lanes: Levels[Lane] = Levels(OrderedDict)
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, ticket: Ticket, rate: float | None) -> None:
        """Queue *ticket*. *rate*: requests that end per second, if known, for the advice in :class:`TooBusy`."""
        if len(self._tickets) >= self.limit:
            raise TooBusy(
                f"the queue is full ({len(self._tickets)} requests wait); try again later",
                retry_after=self._retry_after(rate),
            )
        if ticket.request in self._tickets:
            raise ValueError(f"request {ticket.request!r} is queued already")
        lane = self._lanes.at(ticket.priority)
        tenant = self._tenant(ticket)
        line = lane.get(tenant)
        if line is None:
            line = lane[tenant] = OrderedDict()
        line[ticket.request] = self._tickets[ticket.request] = ticket

    def start(self, admit: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take tickets until *admit* refuses one; that one is asked about first next time, unless a ticket of higher
        priority has come. Whatever stands behind it, of any tenant, waits: else small requests would starve large ones.

        *admit* must not raise and must not call back.
        """
        started: list[Ticket] = []
        while self._lanes:
            lane = self._lanes.top
            tenant = next(iter(lane))
            ticket = next(iter(lane[tenant].values()))
            if not admit(ticket):
                break
            started.append(ticket)
            lane.move_to_end(tenant)
            self._remove(ticket)
        return started

    def remove(self, request: str) -> Ticket | None:
        """Take *request* out of the queue; ``None`` when it is not in it."""
        ticket = self._tickets.get(request)
        if ticket is not None:
            self._remove(ticket)
        return ticket

    def _remove(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request]
        lane = self._lanes.at(ticket.priority)
        tenant = self._tenant(ticket)
        line = lane[tenant]
        del line[ticket.request]
        if not line:
            del lane[tenant]
        if not lane:
            self._lanes.drop(ticket.priority)

    def _tenant(self, ticket: Ticket) -> str:
        return ticket.tenant if self.by_tenant else ""

    def _retry_after(self, rate: float | None) -> float:
        """Seconds in which half of the queue should be gone: then there is room, and the server has not run dry."""
        if rate is None:
            return self.MIN_RETRY
        return min(max(len(self._tickets) / 2 / rate, self.MIN_RETRY), self.MAX_RETRY)
