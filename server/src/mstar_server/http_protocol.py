"""uvicorn's HTTP protocol with bounds on what a client may send and on how long it may take, which it lacks.

Without them a client could send header lines for ever and fill the memory, or hold connections open that never become
requests; and one that uploads too much would see a reset connection instead of its answer.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mstar.spec.errors import RequestError
from mstar_server.errors import BREAK_OFF, error_object
from mstar_server.exchange import ID_HEADER, new_id

__all__ = ["BoundedHttp"]


_LINGER_S = 1.0
"""A connection that was answered before its request was complete is closed when nothing has come for so long."""

_LONGEST_LINGER_S = 30.0
"""… and in any case after so long."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head larger than *max_head_bytes*, 408 to a head that takes longer than *head_timeout_s* and to
    a body of which nothing comes for *body_timeout_s*, and 400 to what is no HTTP, all in the one error form."""

    def __init__(
        self,
        *arguments: Any,
        max_head_bytes: int,
        head_timeout_s: float = 30.0,
        body_timeout_s: float = 60.0,
        **named: Any,
    ):
        super().__init__(*arguments, **named)
        self._max_head_bytes = max_head_bytes
        self._head_timeout_s, self._body_timeout_s = head_timeout_s, body_timeout_s
        self._head_bytes = 0  # of complete header lines
        self._pending_bytes = 0  # received of a head that is not complete
        self._head_is_open, self._message_ended = True, False
        self._refused = False  # answered, and about to close: what still arrives is thrown away
        self._upgraded = False  # a websocket has taken the connection over
        self._patience: asyncio.TimerHandle | None = None
        self._waits_for_head = False
        self._linger_ends, self._heard = 0.0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(head=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.transport = self.transport  # no circle, which would have to wait for the collector

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._heard = True
            return
        if not self._waits_for_head:
            self._stop_waiting()
        was_open, self._message_ended = self._head_is_open, False
        super().data_received(data)
        if self._refused or self._upgraded:
            return
        if not (was_open and self._head_is_open) or self._message_ended:
            self._pending_bytes = 0  # this piece held other things than one head's middle
            self._stop_waiting()
            if not self._message_ended:  # the head of the next request, or the body of this one, is not complete
                self._wait(head=self._head_is_open)
            return
        self._pending_bytes += len(data)
        if self._pending_bytes > self._max_head_bytes and not self.transport.is_closing():
            self.send_400_response("")
        elif self._patience is None:
            self._wait(head=True)

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def _wait(self, head: bool) -> None:
        """Be impatient from now on: for a *head* to be complete, or for more of a body."""
        self._waits_for_head = head
        seconds = self._head_timeout_s if head else self._body_timeout_s
        self._patience = self.loop.call_later(seconds, self._on_silence)

    def _stop_waiting(self) -> None:
        self._waits_for_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _on_silence(self) -> None:
        self._patience = None
        if self._refused or self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and (self._waits_for_head or self.cycle.response_started)):
            self._wait(self._waits_for_head)  # it waits for us
        elif self._waits_for_head and not self._pending_bytes and not self._head_bytes:
            self.transport.close()  # a connection that was opened in advance
        elif self._waits_for_head or answering:
            what, seconds = ("head", self._head_timeout_s) if self._waits_for_head else ("body", self._body_timeout_s)
            late = f"took longer than {seconds:g} s" if self._waits_for_head else f"paused for more than {seconds:g} s"
            error = RequestError(f"the request's {what} {late}", code="request_timeout", status=408)
            if answering:
                self.cycle.disconnected = True  # what waits for the body is told that its client is gone
                self.cycle.message_event.set()
            self._refuse(b"HTTP/1.1 408 Request Timeout\r\n", error)
        else:
            self.transport.close()  # the rest of a body that nobody wants: it has its answer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._head_is_open = 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(b": \r\n")
        if self._head_bytes > self._max_head_bytes:
            raise ValueError("the head is too large")  # the parser stops, and uvicorn calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            transport = _Lingering(self, self.cycle)
            scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
            scope[BREAK_OFF] = weakref.WeakMethod(transport.break_off)
            self.cycle.transport = transport  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_is_open = self._message_ended = True

    def send_400_response(self, msg: str) -> None:
        """Answer in the error form and close the connection."""
        if max(self._head_bytes, self._pending_bytes) > self._max_head_bytes:
            limit = self._max_head_bytes
            line = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            error = RequestError(f"the headers are larger than the limit of {limit} bytes", code="headers_too_large")
        else:
            line = b"HTTP/1.1 400 Bad Request\r\n"
            error = RequestError("the request is not valid HTTP", code="invalid_http")
        self._refuse(line, error)

    def _refuse(self, line: bytes, error: RequestError) -> None:
        body = msgspec.json.encode(error_object(error))
        name = f"{ID_HEADER.lower()}: {new_id()}\r\n".encode()
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            + name
            + b"\r\n"
        )
        self.transport.write(line + head + body)
        self.linger()

    def linger(self) -> None:
        """Close, but go on reading for a while: closing with unread bytes resets the connection, and a client that is
        still sending would then lose the answer."""
        self._refused = True
        self._stop_waiting()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_ends = self.loop.time() + _LONGEST_LINGER_S
        self.loop.call_later(_LINGER_S, self._end_linger)

    def _end_linger(self) -> None:
        if self._heard and self.loop.time() < self._linger_ends and not self.transport.is_closing():
            self._heard = False
            self.loop.call_later(_LINGER_S, self._end_linger)
        else:
            self.transport.close()


class _Lingering:
    """A connection as the answer to one of its requests sees it: closing waits for a client that is still sending."""

    def __init__(self, protocol: BoundedHttp, cycle: RequestResponseCycle):
        self._protocol, self._cycle = protocol, cycle
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body and self._cycle.response_complete and not self.is_closing():
            self._protocol.linger()
        else:
            self._protocol.transport.close()

    def break_off(self) -> None:
        """Close in the middle of the response: nobody takes the part for the whole."""
        self._cycle.disconnected = True  # else uvicorn misses the rest
        self._protocol.transport.close()
