"""``POST /v1/requests/{id}/cancel`` and ``DELETE /v1/requests/{id}``: end a request by its id."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from mstar.spec.errors import RequestError
from mstar_server.exchange import current
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["requests"])


@router.post("/v1/requests/{request_id}/cancel", summary="Cancel a request of one's own")
@router.delete("/v1/requests/{request_id}", summary="Cancel a request of one's own")
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """*request_id*: the ``X-Request-ID`` of its answer, or the ``id`` in it. What a request has made by then is its
    answer, with finish reason ``cancelled``; one that had not begun is answered 499."""
    state: ServerState = request.app.state.mstar
    asking = current()
    tenant = "" if asking is None else asking.tenant
    cancelled = state.exchanges.cancel(request_id, tenant, asking)
    if not cancelled:
        message = f"no request {request_id[:128]!r} of yours is in flight"
        raise RequestError(message, param="id", code="request_not_found", status=404)
    return {"id": request_id, "object": "request", "status": "cancelled", "requests": cancelled}
