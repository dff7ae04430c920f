"""Streams of bytes to a client: server-sent events and JSON lines, with an end for every way to end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "data_event", "json_line", "named_event"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data_event(value: Any) -> bytes:
    """*value* as one server-sent event. JSON has no raw line breaks, so that one ``data:`` line is enough."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """Likewise, with the event's name, its ``type``, on a line of its own: for routes whose events have names."""
    name: str = value["type"]
    return b"".join(
        (b"event: ", name.encode(), b"\ndata: ", _encode(value), b"\n\n")
    )  # megabytes, perhaps: copied once


def json_line(value: Any) -> bytes:
    """*value* as a line of a stream of JSON lines."""
    return _encode(value) + b"\n"


class EventStream(StreamingResponse):
    """A streaming response that calls *on_close* however it ends: finished, failed, or left by the client.

    A generator alone cannot promise that: one that was never started has no ``finally`` to run.

    It does not listen for the client itself, as its base class does with a task more for each response: whoever leaves
    ends the exchange (:mod:`mstar_server.exchange`), and that cancels this.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, on_close: Callable[[], None]):
        # no-transform and X-Accel-Buffering: proxies must pass every event on at once
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        super().__init__(chunks, 200, headers, media_type)
        self._chunks, self._on_close = chunks, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._chunks):
                await self.stream_response(send)
        finally:
            self._on_close()
