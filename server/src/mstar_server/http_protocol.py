"""uvicorn's HTTP protocol with a bound on a request's head, which its fast parser lacks.

Without one, a client could send header lines for ever and fill the memory.
"""

from __future__ import annotations

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mstar.spec.errors import RequestError
from mstar_server.errors import error_object
from mstar_server.exchange import ID_HEADER, new_id

__all__ = ["BoundedHttp"]


_LINGER_S = 1.0
"""How long a refused connection is read from after its answer."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head larger than *max_head_bytes*, and 400 to what is no HTTP, both in the one error form."""

    def __init__(self, *arguments: Any, max_head_bytes: int, **named: Any):
        super().__init__(*arguments, **named)
        self._max_head_bytes = max_head_bytes
        self._head_bytes = 0  # of complete header lines
        self._pending_bytes = 0  # received of a head that is not complete
        self._head_is_open, self._message_ended = True, False
        self._refused = False  # answered, and about to close: what still arrives is thrown away

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        was_open, self._message_ended = self._head_is_open, False
        super().data_received(data)
        if not (was_open and self._head_is_open) or self._message_ended:
            self._pending_bytes = 0  # this piece held other things than one head's middle
            return
        self._pending_bytes += len(data)
        if self._pending_bytes > self._max_head_bytes and not self.transport.is_closing():
            self.send_400_response("")

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
        super().on_headers_complete()

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
        body = msgspec.json.encode(error_object(error))
        name = f"{ID_HEADER.lower()}: {new_id()}\r\n".encode()
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            + name
            + b"\r\n"
        )
        self.transport.write(line + head + body)
        self._linger()

    def _linger(self) -> None:
        """Close, but go on reading for a moment: closing with unread bytes resets the connection, and a client that is
        still sending would then lose the answer."""
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
