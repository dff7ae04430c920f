"""``GET /metrics``: what Prometheus reads. Answers while models load, and while a worker hangs."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar_server.openapi import answers
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()

STATUS_TIMEOUT_S = 1.0
"""How long a scrape waits for a worker in the middle of a step; then it does without that worker's figures."""


@router.get(
    "/metrics",
    tags=["health"],
    summary="Metrics for Prometheus",
    response_model=None,
    responses=answers("All metrics", "text/plain", "application/openmetrics-text"),
)
async def metrics(request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    phases = {key: service.phase.name for key, service in state.services.items()}
    asked = [key for key, phase in phases.items() if phase in ("ready", "draining")]
    known = await asyncio.gather(*(state.workers.ask(key, state.services[key], STATUS_TIMEOUT_S) for key in asked))
    # Old figures would be taken for new ones.
    statuses = {key: one.status for key, one in zip(asked, known, strict=True) if one.status and not one.age_s}
    text, content_type = state.observer.metrics.render(phases, statuses, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})
