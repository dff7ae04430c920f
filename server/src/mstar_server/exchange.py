"""The life of a request: its id, its caller, its time, and its end.

One :class:`Exchange` is one HTTP request, one websocket, or one request on a websocket. It begins before the first
route is looked for and ends after the last byte, so that no route needs to think of a client that leaves, of a time
that runs out, or of a cancel by id: what its answers are started with (:func:`mstar_server.answers.start`) belongs to
the exchange, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.api_keys import ApiKey
from mstar.spec.errors import RequestError, TooBusy
from mstar_server.errors import error_response, refuse, request_cancelled
from mstar_server.protocols import Answer

__all__ = ["Exchange", "ExchangeLife", "ExchangeWatcher", "Exchanges", "current", "name_log_lines", "new_id"]

log = logging.getLogger("mstar.server")

ID_HEADER = "X-Request-ID"
TIMEOUT_HEADER = "X-Request-Timeout"
LONGEST_TIMEOUT_S = 7 * 86400.0
SHOWN_ANSWERS = 4
"""Of so many answers the line of log for a request names all: a long clip has hundreds of windows."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LATE_S = 2.0
"""How long after its time a request is ended here: what runs in the engine is ended there, with its own error."""

_current: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("mstar_exchange", default=None)


def current() -> Exchange | None:
    """The exchange that this task works for; ``None`` outside of one."""
    return _current.get()


def new_id() -> str:
    """The id of a request that came without one."""
    return f"req-{uuid.uuid4().hex}"


class Exchange:
    """:ivar id: the client's ``X-Request-ID`` if that is one, else made up. Not unique: clients may repeat theirs.
    :ivar caller: whose key it came with; ``None`` where no keys are asked for.
    :ivar deadline: of the client, in monotonic seconds.
    :ivar answers: what runs for it, or has run, by the engine's id. :ivar released: the ids of those that it knows no
        more of.
    """

    def __init__(self, exchange_id: str, book: Exchanges, seconds: float | None = None, caller: ApiKey | None = None):
        self.id, self.book, self.caller, self.seconds = exchange_id, book, caller, seconds
        self.began = time.monotonic()
        self.deadline = None if seconds is None else self.began + seconds
        self.answers: dict[str, Answer] = {}
        self.released: list[str] = []
        self.error: RequestError | None = None
        self.status = 499  # of the response; until there is one, what the log calls a client that left
        self.responding = self.responded = False  # the head is out; the last byte is
        self.task: asyncio.Future[Any] | None = None
        self.scope: Scope = {}
        self.span: Any = None  # of whoever traces it
        self._entered = self._handed_over = False

    @property
    def route(self) -> str:
        """The route that it reached, as that is written in the application: ``/v1/requests/{request_id}``."""
        path: str = getattr(self.scope.get("route"), "path", "unmatched")
        return path

    @property
    def tenant(self) -> str:
        """What keeps its requests apart from those of others."""
        return "" if self.caller is None else self.caller.id

    def enter(self) -> None:
        """Count it as one of its caller's requests, once. Raises :class:`TooBusy` when the caller has too many."""
        if not self._entered:
            self.book.limits.enter(self.caller)
            self._entered = True

    def hand_over(self) -> Callable[[], None]:
        """Its place among its caller's requests, for work that goes on when it has ended. What is returned gives that
        back, and does nothing when it is called again."""
        held = self._entered and not self._handed_over
        self._handed_over = self._handed_over or held

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                self.book.limits.leave(self.caller)

        return leave

    def remaining(self) -> float | None:
        """Seconds that are left. Raises status 504 when there are none."""
        if self.deadline is None:
            return None
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self.timed_out()
        return left

    def timed_out(self) -> RequestError:
        message = f"the request took longer than {self.seconds:g} s"
        return RequestError(message, code="timeout", status=504, type="server_error")

    def adopt(self, answer: Answer) -> None:
        """*answer* ends with this exchange. Raises when that has ended already."""
        if self.error is not None:
            answer.cancel("cancelled")
            raise self.error
        self.answers[answer.id] = answer
        self.book.add(answer.id, self)

    def release(self, answer: Answer) -> None:
        """*answer* has ended and has been read. For those of whom there may be thousands, one after the other."""
        if self.answers.pop(answer.id, None) is not None:
            self.released.append(answer.id)
            self.book.drop(answer.id, self)

    def cancel(self, answer_id: str | None = None) -> None:
        """End it at its client's wish: what runs ends with finish reason ``cancelled``; before that, an error.

        :param answer_id: only this one of its answers.
        """
        if answer_id is not None:
            self.answers[answer_id].cancel("cancelled")
            return
        error = request_cancelled()
        if self.answers or self.responding:
            self.error = self.error or error
            self._cancel_answers()
        else:
            self.end(error)

    def end(self, error: RequestError) -> None:
        """End it at once: its answers, and the task of its route."""
        self.error = self.error or error
        self._cancel_answers()
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """It is over, and whatever it started with it."""
        self.error = self.error or RequestError("the request has ended", code="request_ended", status=409)
        for answer in self.answers.values():
            answer.close()
        self.task = None  # its context holds this exchange, and so every file that its answers were about
        self.book.remove(self)
        if self._entered and not self._handed_over:
            self.book.limits.leave(self.caller)

    def _cancel_answers(self) -> None:
        for answer in self.answers.values():
            if answer.finish_reason is None:
                answer.cancel("cancelled")

    @contextlib.contextmanager
    def child(self, exchange_id: str | None = None) -> Iterator[Exchange]:
        """One of several requests on a websocket, as an exchange of its own: the caller's limits, the time and
        cancelling are each request's."""
        inner = Exchange(exchange_id or new_id(), self.book, self.seconds, self.caller)
        inner.task, inner.scope, inner.span = asyncio.current_task(), self.scope, self.span
        self.book.add(inner.id, inner)
        token = _current.set(inner)
        try:
            yield inner
        finally:
            _current.reset(token)
            inner.close()


class Limits:
    """Requests in flight and begun per caller."""

    def __init__(self, max_requests: int | None, requests_per_minute: int | None):
        self.max_requests, self.requests_per_minute = max_requests, requests_per_minute
        self._running: dict[str, int] = {}
        self._begun: dict[str, deque[float]] = {}

    def enter(self, caller: ApiKey | None) -> None:
        if caller is None:
            return
        running = self._running.get(caller.id, 0)
        most = caller.max_requests or self.max_requests
        if most is not None and running >= most:
            raise _too_many(f"this key has {running} requests in flight, its limit", 1.0)
        self._check_rate(caller)
        self._running[caller.id] = running + 1

    def _check_rate(self, caller: ApiKey) -> None:
        rate = caller.requests_per_minute or self.requests_per_minute
        if rate is None:
            return
        now = time.monotonic()
        begun = self._begun.setdefault(caller.id, deque())
        while begun and now - begun[0] >= 60.0:
            begun.popleft()
        if len(begun) >= rate:
            raise _too_many(f"this key has begun {len(begun)} requests within a minute, its limit", 60 - now + begun[0])
        begun.append(now)

    def leave(self, caller: ApiKey | None) -> None:
        if caller is None:
            return
        running = self._running[caller.id] - 1
        if running:
            self._running[caller.id] = running
        else:
            del self._running[caller.id]


def _too_many(message: str, retry_after: float) -> TooBusy:
    error = TooBusy(message, retry_after=retry_after)
    error.code = "rate_limit_exceeded"
    return error


class Exchanges:
    """All exchanges that go on, by their ids and by those of their answers."""

    def __init__(self, max_requests: int | None = None, requests_per_minute: int | None = None):
        self.limits = Limits(max_requests, requests_per_minute)
        self._by_id: dict[str, dict[Exchange, None]] = {}

    def add(self, name: str, exchange: Exchange) -> None:
        self._by_id.setdefault(name, {})[exchange] = None

    def remove(self, exchange: Exchange) -> None:
        for name in (exchange.id, *exchange.answers):
            self.drop(name, exchange)

    def drop(self, name: str, exchange: Exchange) -> None:
        """*exchange* is not called *name* any more."""
        named = self._by_id.get(name, {})
        named.pop(exchange, None)
        if not named:
            self._by_id.pop(name, None)

    def cancel(self, name: str, tenant: str, asking: Exchange | None) -> int:
        """Cancel what is called *name* and belongs to *tenant*, but never *asking* itself. Returns how many that
        were."""
        found = [e for e in self._by_id.get(name, ()) if e.tenant == tenant and e is not asking]
        for exchange in found:
            exchange.cancel(name if name in exchange.answers else None)
        return len(found)

    def __len__(self) -> int:
        return len({exchange for named in self._by_id.values() for exchange in named})


class ExchangeWatcher(Protocol):
    """Is told of every exchange but those within a websocket."""

    def exchange_begins(self, exchange: Exchange, headers: Headers) -> None: ...

    def exchange_ends(self, exchange: Exchange) -> None: ...


class ExchangeLife:
    """The outermost layer: gives each request its exchange, watches the connection, and ends what has to end."""

    def __init__(self, app: ASGIApp, book: Exchanges, watcher: ExchangeWatcher):
        self.app, self.book, self.watcher = app, book, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(ID_HEADER, "")
        exchange = Exchange(given if _ID.fullmatch(given) else new_id(), self.book)
        exchange.scope = scope
        self.book.add(exchange.id, exchange)
        token = _current.set(exchange)
        self.watcher.exchange_begins(exchange, headers)
        named = _naming(exchange, send)
        try:
            try:
                exchange.seconds = _seconds(headers.get(TIMEOUT_HEADER))
            except RequestError as error:
                await refuse(error, scope, receive, named)
                return
            if exchange.seconds is not None:
                exchange.deadline = exchange.began + exchange.seconds
            if scope["type"] == "http":
                await self._serve(exchange, scope, receive, named)
            else:
                await self.app(scope, receive, named)
        finally:
            exchange.close()
            self.watcher.exchange_ends(exchange)
            _note(exchange, scope)
            exchange.answers.clear()  # whatever the connection's timers hold, it is not the files of its last request
            _current.reset(token)

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = _Inbox(receive)
        task = exchange.task = asyncio.ensure_future(self.app(scope, inbox.receive, send))
        watch = asyncio.create_task(inbox.watch())
        try:
            await asyncio.wait((task, watch), timeout=_patience(exchange), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not watch.done():
                if not exchange.responding:
                    exchange.end(exchange.timed_out())
                await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if not exchange.responded:  # else the server calls the end of the response a disconnect
                    exchange.status = 499
                    exchange.end(RequestError("the client has gone", code="client_gone", status=499))
                await asyncio.wait((task,))
            if not task.cancelled():
                task.result()
            elif exchange.error is None:
                raise asyncio.CancelledError  # by someone else
            elif not exchange.responding:
                await error_response(exchange.error)(scope, receive, send)
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


def _patience(exchange: Exchange) -> float | None:
    return None if exchange.deadline is None else max(0.0, exchange.deadline + _LATE_S - time.monotonic())


class _Inbox:
    """What a client sends. Once the body is complete, only its leaving can follow, which :meth:`watch` waits for; the
    application is told of it as well."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._complete, self._gone = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Message:
        if self._complete.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
            self._complete.set()
            await asyncio.Event().wait()  # whoever reads half a body is cancelled now; it is nobody's fault
        if not message.get("more_body", False):
            self._complete.set()
        return message

    async def watch(self) -> None:
        """Returns when the client has gone."""
        await self._complete.wait()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()


def _naming(exchange: Exchange, send: Send) -> Send:
    """*send*, with the exchange's id on the answer's head."""

    async def named(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            exchange.responding, exchange.status = True, message.get("status", 101)
            message.setdefault("headers", [])
            MutableHeaders(scope=message)[ID_HEADER] = exchange.id
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            exchange.responded = True
        await send(message)

    return named


def _seconds(value: str | None) -> float | None:
    """The client's own time limit."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        message = (
            f"{TIMEOUT_HEADER!r} must be seconds, more than 0 and at most {LONGEST_TIMEOUT_S:g}, got {value[:40]!r}"
        )
        raise RequestError(message, param=TIMEOUT_HEADER)
    return seconds


def _note(exchange: Exchange, scope: Scope) -> None:
    """One line of log for each request but probes. The query is left out: it may hold a key."""
    path = quote(scope["path"], safe="/:@,+~!$&'()*;=")
    if path.startswith("/health") or path == "/metrics":
        return
    took = time.monotonic() - exchange.began
    names = [*exchange.released, *exchange.answers]
    shown = names if len(names) <= SHOWN_ANSWERS else [*names[: SHOWN_ANSWERS - 1], names[-1]]
    fields = {
        "method": scope.get("method", "WEBSOCKET"),
        "route": exchange.route,
        "status": exchange.status,
        "seconds": round(took, 6),
        "answers": shown,
    }
    log.info(
        "%s %s: %d in %.3f s%s%s",
        scope.get("method", "WEBSOCKET"),
        path,
        exchange.status,
        took,
        "" if exchange.caller is None else f", key {exchange.caller.name!r}",
        "".join(f", {name}" for name in shown) + (f" ({len(names)} in all)" if shown != names else ""),
        extra={"fields": fields},
    )


def name_log_lines() -> None:
    """From now on, log lines that belong to an exchange begin with its id."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(filter_, _Named) for filter_ in handler.filters):
            handler.addFilter(_Named())


class _Named(logging.Filter):
    """Gives a record the ``request_id`` that formatters show (:mod:`mstar.log_format`)."""

    def filter(self, record: logging.LogRecord) -> bool:
        exchange = current()
        if exchange is not None and not hasattr(record, "request_id"):
            record.request_id = exchange.id
        return True
