"""``GET /v1/models`` and ``GET /v1/models/{id}``; loading and unloading those that are loaded on demand."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request

from mstar.spec.canvas import Canvas
from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar_server.on_demand import OnDemand, model_state
from mstar_server.options import ServerOptions
from mstar_server.protocols import Service
from mstar_server.state import ROUTES, ServerState

__all__ = ["describe_model", "router"]

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", summary="The models that this server has")
async def list_models(request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    models = {key: describe_model(service, state) for key, service in state.services.items()}
    aliases = [{**models[key], "id": alias} for alias, key in state.aliases.items()]
    return {"object": "list", "data": [*models.values(), *aliases]}


@router.get("/v1/models/{model:path}", summary="One model")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    return {**describe_model(state.find(model), state), "id": model}


@router.post("/v1/models/{model:path}/load", summary="Load a model now; waits as a request would")
async def load_model(model: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    service = state.find(model)
    if isinstance(service, OnDemand):
        await service.load(force=True)
    return describe_model(service, state)


@router.post("/v1/models/{model:path}/unload", summary="Unload a model that nobody uses")
async def unload_model(model: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    service = state.find(model)
    if not isinstance(service, OnDemand):
        message = (
            f"the model {service.spec.key!r} is always loaded; `mstar serve --on-demand KEY` serves one that is not"
        )
        raise RequestError(message, param="model", code="always_loaded", status=409)
    await service.unload()
    return describe_model(service, state)


def describe_model(service: Service, state: ServerState) -> dict[str, Any]:
    """What listings say of a model."""
    spec = service.spec
    return {
        "id": spec.key,
        "root": spec.key,
        "object": "model",
        "state": model_state(service),
        "created": state.created,
        "owned_by": spec.family,
        "summary": spec.summary,
        "abilities": list(spec.abilities),
        "routes": [ROUTES[a] for a in spec.abilities if ROUTES[a] in state.mounted],
        "modalities": {"input": list(spec.inputs), "output": list(spec.outputs)},
        "live": [dataclasses.asdict(stream) for stream in spec.live],
        "licence": _licence(spec),
        "limits": dict(service.limits),
        "canvas": _canvas(service.canvas, state.options),
        "knobs": spec.knobs.model_json_schema().get("properties", {}),
    }


def _canvas(canvas: Canvas | None, options: ServerOptions) -> dict[str, Any] | None:
    """*canvas* with the sizes that this server's limit leaves."""
    if canvas is None:
        return None
    sizes = canvas.sizes.within(options.max_pixels) or canvas.sizes
    return dataclasses.asdict(dataclasses.replace(canvas, sizes=sizes))


def _licence(spec: ModelSpec) -> dict[str, Any]:
    licence = spec.licence
    return {
        "name": licence.name,
        "url": licence.url,
        "commercial": licence.commercial,
        "gated": licence.gated,
        "permissive": licence.permissive,
    }
