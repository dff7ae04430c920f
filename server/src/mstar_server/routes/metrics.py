"""``GET /metrics``: what Prometheus reads. Answers while models load, and while a worker hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar_server.openapi import answers
from mstar_server.protocols import Service
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
    answers = await asyncio.gather(*(_status(state.services[key]) for key in asked))
    statuses = {key: status for key, status in zip(asked, answers, strict=True) if status}
    text, content_type = state.observer.metrics.render(phases, statuses, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})


async def _status(service: Service) -> Mapping[str, Any]:
    try:
        return await asyncio.wait_for(service.status(), STATUS_TIMEOUT_S)
    except TimeoutError:
        return {}
