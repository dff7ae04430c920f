"""``POST /v1/embeddings``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.runtime.family import family_code
from mstar_server.openai.embeddings import EmbeddingRequest
from mstar_server.openai.embeddings import embeddings as whole
from mstar_server.openai.text_answers import Head, respond
from mstar_server.openapi import answers
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()


@router.post(
    "/v1/embeddings",
    tags=["OpenAI"],
    summary="Texts to vectors",
    response_model=None,
    responses=answers("A list of embeddings", "application/json"),
)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "embedding")
    adapter = state.adapter("embedding", service)
    with family_code(f"{service.spec.key!r} could not read a text", type(adapter).__module__):
        tasks = adapter.tasks(body)
    return await respond(
        request,
        service,
        tasks,
        Head.of(service, "embd"),
        samples=1,
        whole=partial(whole, encode=body.encoding_format == "base64"),
        chunks=None,
        samples_param="input",
    )
