"""One running request as its client sees it: an asynchronous iterator of deltas."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from msgspec import structs

from mstar.cluster.base import Executor
from mstar.runtime.amounts import Made, brought
from mstar.runtime.family import family_code
from mstar.runtime.watch import Outcome, Watched
from mstar.spec.errors import NotReady, RequestError, TooBusy
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta, Prepared, Renderer, TextDelta
from mstar.spec.request import Cancel, Done, Emit, Event, Failed, Push, Usage
from mstar.spec.tasks import Audio, Task

__all__ = ["Acks", "Answer", "request_error"]

_ACK_DELAY_S = 0.002
"""How long acks are collected: less than a step takes, so that all requests' acks together cost one message a step."""


def request_error(failed: Failed) -> RequestError:
    """The exception that a ``Failed`` event stands for."""
    error: RequestError
    if failed.status == 429:
        error = TooBusy(failed.message, retry_after=failed.retry_after or 1.0)
    elif failed.status == 503:
        error = NotReady(failed.message, retry_after=failed.retry_after or 5.0)
    else:
        error = RequestError(failed.message, param=failed.param, status=failed.status, type=failed.type)
    error.code = failed.code
    return error


_ACK_AT_ONCE = 16
"""… and how many of one stream are told at once: so that a fast one, whose worker may be only so far ahead of it, does
not wait."""


class Acks:
    """Tells the worker what clients have taken, in batches (back-pressure)."""

    def __init__(self, executor: Executor, loop: asyncio.AbstractEventLoop):
        self._executor, self._loop = executor, loop
        self._taken: dict[tuple[str, str], int] = {}

    def add(self, request: str, stream: str) -> None:
        """One more emission of *stream* has been taken."""
        taken = self._taken
        if not taken:
            self._loop.call_later(_ACK_DELAY_S, self._flush)
        key = (request, stream)
        items = taken[key] = taken.get(key, 0) + 1
        if items == _ACK_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        taken, self._taken = self._taken, {}
        for (request, stream), items in taken.items():
            self._executor.ack(request, stream, items)


class Answer:
    """Iterate it for the deltas of one request; made by :meth:`mstar.runtime.service.Service.generate`.

    The iterator raises :class:`~mstar.spec.errors.RequestError` (:class:`TooBusy <mstar.spec.errors.TooBusy>`,
    :class:`NotReady <mstar.spec.errors.NotReady>`) when the request fails, and
    :class:`~mstar.spec.errors.FaultFound` when the family's renderer does. A request whose answer nobody holds any
    more, or whose :meth:`aclose` was called, is cancelled. One task at a time may read; a read that is itself cancelled
    (by a timeout) loses nothing.

    :ivar id: the request's id. :ivar prompt_tokens: tokens of the prompt.
    :ivar completion_tokens: tokens so far, those held back for a stop string included; at the end all that language
        models generated, also for a codec.
    :ivar finish_reason: why the answer ended; ``None`` while it runs and when it failed.
    :ivar usage: what it cost, once it has ended well.
    :ivar heard: client stream → how many of its items had been read for the delta that was taken last; see
        :meth:`push`. Empty without live input.
    """

    def __init__(
        self,
        spec: ModelSpec,
        task: Task,
        prepared: Prepared,
        renderer: Renderer,
        executor: Executor,
        acks: Acks,
        prepare_push: Callable[[str, Any, str, bool], Awaitable[Push]],
        watched: Watched | None = None,
    ):
        self.spec, self.id = spec, prepared.request.id
        self.prompt_tokens = prepared.prompt_tokens
        self._brought, self._made = brought(task, prepared.prompt_tokens), Made()
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._renderer, self._executor, self._acks, self._prepare_push = renderer, executor, acks, prepare_push
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Event] = deque()
        self._deltas: deque[tuple[Delta, Mapping[str, int]]] = deque()
        self.heard: Mapping[str, int] = {}
        self._rendered: Mapping[str, int] = {}  # what the event rendered last had heard
        self._sent = _items_along(prepared)
        self._waiter: asyncio.Future[None] | None = None
        self._wake: Callable[[], None] | None = None
        self._fault: Exception | None = None  # what is raised when all deltas before it have been taken
        self._heard = False
        self._ended = False
        self._push_order = asyncio.Lock()
        self._watched = watched

    # --- from the engine -------------------------------------------------------------------------------------------

    def deliver(self, event: Event) -> None:
        """Take *event* from the executor; it is rendered when the client asks for it."""
        self._inbox.append(event)
        if self._watched is not None:
            self._watched.watch.heard(event)
        self._call_reader()

    def _call_reader(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._wake is not None:
            self._wake()

    # --- to the client ---------------------------------------------------------------------------------------------

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            self._raise_fault()
            if self._ended:
                raise StopAsyncIteration
            await self._advance()
        delta, self.heard = self._deltas.popleft()
        return delta

    async def take(self) -> list[Delta]:
        """All deltas that are there by now, after waiting for the first; an empty list at the end."""
        while (deltas := self.take_now()) is not None:
            if deltas:
                return deltas
            await self._wait()
        return []

    def take_now(self) -> list[Delta] | None:
        """All deltas that are there by now, possibly none; ``None`` at the end. Raises what the iterator would, when
        what came before it has been taken."""
        if not self._deltas:
            self._raise_fault()
        try:
            while self._inbox and not self._ended:
                self._process(self._inbox.popleft())
        except Exception as error:
            if not self._deltas:
                raise
            self._fault = error
        if not self._deltas:
            return None if self._ended else []
        deltas = [delta for delta, _ in self._deltas]
        self.heard = self._deltas[-1][1]
        self._deltas.clear()
        return deltas

    def listen(self, wake: Callable[[], None] | None) -> None:
        """From now on call *wake* whenever there may be more for :meth:`take_now`; at once, if there is. For readers of
        several answers; ``None`` ends it."""
        self._wake = wake
        if wake is not None and (self._inbox or self._deltas or self._ended):
            wake()

    @property
    def follow(self) -> Task | None:
        """What goes on with this answer, once it has ended well (:attr:`mstar.spec.processor.Renderer.follow`)."""
        return self._renderer.follow if self.finish_reason is not None else None

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    async def first(self) -> None:
        """Wait until the engine has said anything about this request; no delta is lost.

        Raises what the iterator would: an HTTP front end awaits this before it sends a status line.
        """
        while not self._heard:
            await self._advance()

    async def push(self, stream: str, part: Any, end: bool = False) -> range:
        """Send *part* (a task part, an array, or ``None``) on one of the request's client streams; *end* closes it.

        Returns which items of the stream *part* became: a delta has heard something of it once :attr:`heard` is above
        the range's start, and all of it once it has reached the range's end. Raises :class:`RequestError` when the
        processor refuses it or the request has ended.
        """
        async with self._push_order:
            self._check_running()
            push = await self._prepare_push(stream, part, self.id, end)
            self._check_running()
            self._executor.push(push)
            first = self._sent.get(stream, 0)
            self._sent[stream] = first + (0 if push.data is None else len(push.data))
            if isinstance(part, Audio):
                seconds = self._brought.get("audio_seconds", 0.0) + len(part.samples) / part.rate
                self._brought["audio_seconds"] = seconds
            return range(first, self._sent[stream])

    def cancel(self, reason: str = "cancelled") -> None:
        """End the request within one step, with that finish reason. Does nothing once it has ended."""
        if not self._ended:
            self._executor.cancel(Cancel(id=self.id, reason=reason))

    def close(self) -> None:
        """Cancel the request and drop what it has not delivered: nobody reads it any more."""
        self._leave()
        self._deltas.clear()
        self._fault = None
        self._call_reader()

    async def aclose(self) -> None:
        """:meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The collector may run in any thread.
        if not getattr(self, "_ended", True):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the worker with it
                self._loop.call_soon_threadsafe(self._executor.cancel, Cancel(id=self.id))
                if self._watched is not None:
                    self._loop.call_soon_threadsafe(self._watched.reader_ended, self._outcome())

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Process one event, waiting for it if need be."""
        await self._wait()
        if self._inbox:  # else: closed meanwhile
            self._process(self._inbox.popleft())

    async def _wait(self) -> None:
        """Until there is an event, or the answer is closed."""
        if not self._inbox:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _raise_fault(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def _process(self, event: Event) -> None:
        self._heard = True
        if isinstance(event, Failed):
            self._ended = True
            error = request_error(event)
            self._tell_end(error)
            raise error
        try:
            if isinstance(event, Done):
                self._end(event, event.reason, event.usage)
            else:
                self._render(event)
        except BaseException as error:
            self._leave(error)
            if not isinstance(error, Exception):
                raise
            with family_code(f"{self.spec.key!r} could not render an answer", self.spec.processor):
                raise

    def _render(self, event: Emit) -> None:
        self._acks.add(event.id, event.stream)
        if event.heard is not None:
            self._rendered = event.heard
        if type(event.data) is list:
            self.completion_tokens += len(event.data)
        renderer = self._renderer
        self._take(renderer.feed(event))
        if renderer.finished is not None:
            self._executor.cancel(Cancel(id=self.id, reason=renderer.finished))
            # The engine's own count would depend on how many steps it ran before it heard of the end.
            self._end(None, renderer.finished, Usage(output={"tokens": self.completion_tokens}))

    def _take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if type(delta) is not TextDelta:
                self._made.add(delta)
                if self._watched is not None:
                    self._watched.watch.made(delta)
            self._deltas.append((delta, self._rendered))

    def _end(self, done: Done | None, reason: str, usage: Usage) -> None:
        self._take(self._renderer.finish(done))
        self.completion_tokens = int(usage.output.get("tokens", self.completion_tokens))
        self.usage = structs.replace(usage, input=self._brought, output=self._made.of(usage.output))
        self.finish_reason, self._ended = reason, True
        self._tell_end()

    def _leave(self, error: BaseException | None = None) -> None:
        """Nobody will read on, perhaps because of *error*: cancel the request, unless it has ended."""
        self.cancel()
        self._heard = self._ended = True
        self._inbox.clear()
        self._tell_end(error)

    def _tell_end(self, error: BaseException | None = None) -> None:
        if self._watched is not None:
            self._watched.reader_ended(self._outcome(error))

    def _outcome(self, error: BaseException | None = None) -> Outcome:
        return Outcome(self.finish_reason, error, self.usage, self.prompt_tokens, self.completion_tokens)

    def _check_running(self) -> None:
        if self._ended:
            raise RequestError(f"request {self.id!r} has ended", code="request_ended", status=409)


def _items_along(prepared: Prepared) -> dict[str, int]:
    """Client stream → the items that the request itself brings."""
    request = prepared.request
    along = {name: request.inputs.get(name) for name in request.client_streams}
    return {name: len(items) for name, items in along.items() if items is not None}
