"""What all websockets have in common: writing to a client that may have left."""

from __future__ import annotations

from starlette.websockets import WebSocket, WebSocketDisconnect

__all__ = ["close", "send"]


async def send(websocket: WebSocket, frame: str | bytes) -> None:
    """One text or binary frame. Raises :class:`WebSocketDisconnect` when the socket has closed, by whichever side."""
    try:
        await (websocket.send_text(frame) if isinstance(frame, str) else websocket.send_bytes(frame))
    except RuntimeError as error:
        raise _gone(error) from error


async def close(websocket: WebSocket, code: int, reason: str) -> None:
    """Close it. Raises :class:`WebSocketDisconnect` when it has closed already. *reason*: cut at what a frame holds."""
    try:
        await websocket.close(code, reason.encode()[:123].decode("utf-8", "ignore"))
    except RuntimeError as error:
        raise _gone(error) from error


def _gone(error: RuntimeError) -> WebSocketDisconnect:
    """Uvicorn closes a socket by itself (a message beyond its limit, a ping that nobody answers) and calls what is sent
    before that has been read a RuntimeError, as Starlette does after a failed send."""
    return WebSocketDisconnect(1006, str(error))
