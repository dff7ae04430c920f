"""A whole answer that is sent from where its parts lie."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["PartsResponse"]

_SENT_BYTES = 1 << 16
"""Smaller parts are joined with those after them: each that is sent costs a turn of the event loop."""


class PartsResponse(Response):
    """*parts*, one after the other, are the body. Clients see its length, as of any other."""

    def __init__(self, parts: Sequence[bytes], media_type: str):
        self._parts = parts
        super().__init__(None, 200, {"Content-Length": str(sum(map(len, parts)))}, media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        held: list[bytes] = []
        for part in self._parts:
            held.append(part)
            if len(part) >= _SENT_BYTES:
                await send({"type": "http.response.body", "body": b"".join(held), "more_body": True})
                held = []
        await send({"type": "http.response.body", "body": b"".join(held)})
