"""Bodies in pieces: what is made in pieces is sent in pieces, and never joined."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["PiecesResponse"]


class PiecesResponse(Response):
    """A response whose body is *pieces*, one behind the other; their length is told in the head. To copy megabytes
    takes a millisecond, most of it for memory that has to be made anew each time."""

    def __init__(self, pieces: Sequence[bytes], media_type: str):
        length = sum(len(piece) for piece in pieces)
        super().__init__(headers={"Content-Length": str(length)}, media_type=media_type)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
