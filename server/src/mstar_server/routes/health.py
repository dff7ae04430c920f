"""``/health/live``, ``/health/ready`` and ``/health``: three questions, three answers. None of them needs a key.

Models that are loaded on demand are listed, and do not count: the server is ready without them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mstar.spec.errors import NotReady
from mstar_server.errors import error_object, error_response
from mstar_server.protocols import Service
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(prefix="/health", tags=["health"])

STATUS_TIMEOUT_S = 2.0
"""How long ``/health`` waits for a worker in the middle of a step."""


@router.get("/live", summary="The process answers")
async def live() -> dict[str, str]:
    return {"status": "live"}


@router.get("/ready", summary="Every model takes requests; 503 with the phase until then", response_model=None)
async def ready(request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    phases = {key: _phase(service) for key, service in state.services.items()}
    counting = {key: phases[key] for key in state.resident}
    if not state.draining and all(phase["phase"] == "ready" for phase in counting.values()):
        return JSONResponse({"status": "ready", "models": phases})
    waiting = ", ".join(f"{key}: {phase['phase']}" for key, phase in counting.items() if phase["phase"] != "ready")
    error = NotReady("the server is shutting down" if state.draining else f"not ready ({waiting})", retry_after=1.0)
    response = error_response(error)
    failed = any(phase["phase"] == "failed" for phase in counting.values())
    status = "draining" if state.draining else "failed" if failed else "starting"
    body = {"status": status, "models": phases, **error_object(error)}
    return JSONResponse(body, 503, {"Retry-After": response.headers["Retry-After"]})


@router.get("", summary="Phase, progress, queue and pools of every model")
async def health(request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    reports = await asyncio.gather(*(_report(state, key, service) for key, service in state.services.items()))
    models = dict(zip(state.services, reports, strict=True))
    ready = not state.draining and all(models[key]["phase"] == "ready" for key in state.resident)
    return {"status": "draining" if state.draining else "ready" if ready else "not ready", "models": models}


def _phase(service: Service) -> dict[str, Any]:
    phase = service.phase
    return {"phase": phase.name, "progress": phase.progress, "detail": phase.detail}


async def _report(state: ServerState, key: str, service: Service) -> dict[str, Any]:
    report = _phase(service)
    if report["phase"] not in ("ready", "draining"):
        state.workers.forget(key)
        return report
    known = await state.workers.ask(key, service, STATUS_TIMEOUT_S)
    report |= {"worker": known.status, "worker_age_s": None if known.status is None else round(known.age_s, 3)}
    if known.status is None or known.age_s:
        report["detail"] = f"the worker did not answer within {STATUS_TIMEOUT_S} s: it is in a long step, or hangs"
    return report
