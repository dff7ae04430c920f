"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from mstar.spec.model import ModelSpec
from mstar_server.protocols import Service
from mstar_server.state import ROUTES, ServerState

__all__ = ["describe_model", "router"]

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", summary="The models that this server has")
async def list_models(request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    return {"object": "list", "data": [describe_model(s, state) for s in state.services.values()]}


@router.get("/v1/models/{model:path}", summary="One model")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    return describe_model(state.find(model), state)


def describe_model(service: Service, state: ServerState) -> dict[str, Any]:
    """What listings say of a model."""
    spec = service.spec
    return {
        "id": spec.key,
        "object": "model",
        "created": state.created,
        "owned_by": spec.family,
        "summary": spec.summary,
        "abilities": list(spec.abilities),
        "routes": [ROUTES[a] for a in spec.abilities if ROUTES[a] in state.mounted],
        "modalities": {"input": list(spec.inputs), "output": list(spec.outputs)},
        "licence": _licence(spec),
        "limits": dict(service.limits),
        "knobs": spec.knobs.model_json_schema().get("properties", {}),
    }


def _licence(spec: ModelSpec) -> dict[str, Any]:
    licence = spec.licence
    return {
        "name": licence.name,
        "url": licence.url,
        "commercial": licence.commercial,
        "gated": licence.gated,
        "permissive": licence.permissive,
    }
