"""``/v1/realtime``: see :mod:`mstar_server.realtime.session`."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from mstar_server.realtime.session import Session

__all__ = ["router"]

router = APIRouter()

_BETA_PROTOCOL = "openai-beta.realtime-v1"


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept("realtime" if "realtime" in offered else None)
    beta = websocket.headers.get("openai-beta", "").startswith("realtime") or _BETA_PROTOCOL in offered
    query = websocket.query_params
    session = Session(
        websocket,
        websocket.app.state.mstar,
        query.get("model"),
        beta=beta,
        transcription=query.get("intent") == "transcription",
    )
    await session.run()
