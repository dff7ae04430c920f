"""``/generate/ws``: the native route over a websocket. See :mod:`mstar_server.native.socket`."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from mstar_server.native.socket import Socket

__all__ = ["router"]

router = APIRouter()


@router.websocket("/generate/ws")
async def generate_ws(websocket: WebSocket) -> None:
    """Live requests, and many at once on one connection"""
    await websocket.accept()
    await Socket(websocket, websocket.app.state.mstar).run()
