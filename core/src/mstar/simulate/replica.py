"""One replica on virtual time: the real scheduler, told what a worker would tell it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.scheduler.base import Batch, Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.simulate.cost import StepShape
from mstar.simulate.load import MOST_TOKENS, Asked
from mstar.simulate.profile import Profile
from mstar.spec.errors import SetupError, TooBusy

__all__ = ["Replica", "Request"]

_LOOP = ("llm", "forward", ())


@dataclass(slots=True, eq=False)
class Request:
    """One that is on its way. Times are virtual seconds; ``None``: not yet."""

    asked: Asked
    id: str
    came: float
    started: float | None = None
    first: float | None = None
    last: float | None = None
    context: int = 0
    """Tokens in the cache."""
    said: int = 0
    """Tokens of the answer."""
    before: int = 0
    """Steps before the prompt that are done."""
    pages: int = 0
    gaps: list[float] = field(default_factory=list)
    """Between one token and the next, since the owner last took them."""

    @property
    def done(self) -> bool:
        return self.said >= self.asked.output


class Replica:
    """Takes requests and runs one step after the other, as a worker does.

    :ivar requests: those that it has. :ivar busy_s: seconds in which a step ran. :ivar steps: how many.
    :ivar most_pages: the most that were reserved at a time. :ivar most_waiting: the longest that its queue was.
    """

    def __init__(self, profile: Profile):
        self.profile, self._costs = profile, profile.step_costs
        self._scheduler = DefaultScheduler(profile.scheduler)
        self._room = None if profile.kv_tokens is None else profile.kv_tokens // profile.page
        self._used = self._running = 0
        self._batch: Batch | None = None
        self._now = 0.0
        self.requests: dict[str, Request] = {}
        self.busy_s, self.steps, self.most_pages, self.most_waiting = 0.0, 0, 0, 0

    def check(self, asked: Asked) -> None:
        """Raise :class:`SetupError` if *asked* could never run here."""
        if (longest := max(asked.prompt, asked.output)) > MOST_TOKENS:
            raise SetupError(f"a request of {longest} tokens is too long to be played: {MOST_TOKENS:,} at most")
        most, pages = self.profile.max_context, self._pages(asked)
        if most is not None and asked.reserved > most:
            raise SetupError(f"a request of {asked.reserved} tokens is longer than the context of {most}")
        if self._room is not None and pages > self._room:
            raise SetupError(
                f"a request of {asked.reserved} tokens needs {pages} pages of KV cache; a replica has {self._room}"
            )
        for group, _ in asked.before:
            if group not in self._costs:
                known = ", ".join(sorted(self._costs))
                raise SetupError(f"the profile does not say what a step of {group!r} costs; it knows {known}")

    def submit(self, request: Request, now: float) -> bool:
        """Queue *request*. ``False``: the queue is full, and a server would have answered 429."""
        ticket = Ticket(request.id, request.asked.tenant, request.asked.priority, now, request)
        try:
            self._scheduler.submit(ticket)
        except TooBusy:
            self._start(now)  # as a worker does: who need not wait starts, which makes room
            try:
                self._scheduler.submit(ticket)
            except TooBusy:
                return False
        self.requests[request.id] = request
        return True

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._batch is not None

    def begin(self, now: float) -> float | None:
        """Begin a step at *now*; when it will have ended. ``None``: there is nothing to do."""
        self._start(now)
        self.most_waiting = max(self.most_waiting, self._scheduler.waiting)
        batch = self._scheduler.next(now)
        if batch is None:
            return None
        seconds = self._costs[batch.group[0]].seconds(self._shape(batch))
        self._batch, self.busy_s, self.steps = batch, self.busy_s + seconds, self.steps + 1
        return now + seconds

    def end(self, now: float) -> list[Request]:
        """The step that was begun has ended: route its results. Returns the requests that are complete."""
        batch, self._batch = self._batch, None
        assert batch is not None
        complete = []
        for item, tokens in zip(batch.items, batch.tokens, strict=True):
            request: Request = item.payload
            if batch.group != _LOOP:
                request.before += 1
                self._go_on(request)
                continue
            request.context += tokens
            item.tokens -= tokens
            if item.tokens > 0:
                self._scheduler.ready(item)
                continue
            self._speak(request, now)
            if request.done:
                self._finish(request)
                complete.append(request)
            else:
                priority = request.asked.priority
                self._scheduler.ready(Item(request.id, _LOOP, decode=True, priority=priority, payload=request))
        return complete

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        self._now = now
        for ticket in self._scheduler.start(self._admit):
            self._go_on(ticket.payload)

    def _admit(self, ticket: Ticket) -> bool:
        request: Request = ticket.payload
        pages = self._pages(request.asked)
        full = self._room is not None and self._used + pages > self._room
        if full or self._running >= self.profile.max_concurrent_requests:
            return False
        request.pages, request.started = pages, self._now
        self._used, self._running = self._used + pages, self._running + 1
        self.most_pages = max(self.most_pages, self._used)
        return True

    def _go_on(self, request: Request) -> None:
        """Hand in what *request* runs before its first token."""
        asked = request.asked
        if request.before < len(asked.before):
            group, tokens = asked.before[request.before]
            item = Item(request.id, (group, "forward", ()), tokens, payload=request)
        else:
            item = Item(request.id, _LOOP, asked.prompt, chunkable=True, payload=request)
        item.priority = asked.priority
        self._scheduler.ready(item)

    def _speak(self, request: Request, now: float) -> None:
        request.said += 1
        if request.last is None:
            request.first = now
        else:
            request.gaps.append(now - request.last)
        request.last = now

    def _finish(self, request: Request) -> None:
        self._scheduler.forget(request.id)
        self._used, self._running = self._used - request.pages, self._running - 1
        del self.requests[request.id]

    def _shape(self, batch: Batch) -> StepShape:
        tokens = sum(batch.tokens)
        if batch.group != _LOOP:
            return StepShape(len(batch.items), tokens)
        context, pairs = 0, 0.0
        for item, count in zip(batch.items, batch.tokens, strict=True):
            before: int = item.payload.context
            context += before + count
            if count > 1:
                pairs += count * (before + (count + 1) / 2)
        return StepShape(len(batch.items), tokens, context, pairs)

    def _pages(self, asked: Asked) -> int:
        return -(-asked.reserved // self.profile.page)
