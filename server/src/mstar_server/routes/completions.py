"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.runtime.family import family_code
from mstar.spec.processor import Processor
from mstar.spec.tasks import CompletionTask
from mstar_server.openai.completion_request import CompletionRequest
from mstar_server.openai.completion_response import CompletionChunks, completion
from mstar_server.openai.text_answers import Head, respond, token_bytes_of
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions", tags=["OpenAI"], summary="Go on with a text", response_model=None)
async def completions(body: CompletionRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "completion")
    adapter = state.adapter("completion", service)
    with family_code(f"{service.spec.key!r} could not read a prompt", type(adapter).__module__):
        tasks = adapter.tasks(body)
    head, samples = Head.of(service, "cmpl"), body.n or 1
    token_bytes = token_bytes_of(await state.processor(service)) if body.logprobs is not None else None
    prompts = [""] * len(tasks)
    if body.echo:
        prompts = await asyncio.to_thread(_echoes, await state.processor(service), tasks)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return await respond(
        request,
        service,
        tasks,
        head,
        samples=samples,
        whole=partial(completion, token_bytes=token_bytes, prompts=prompts, samples=samples),
        chunks=CompletionChunks(head, usage, token_bytes, prompts, samples) if body.stream else None,
        samples_param="n" if samples > 1 else "prompt",
    )


def _echoes(processor: Processor, tasks: Sequence[CompletionTask]) -> list[str]:
    """The prompts as text. Ids that the model does not have are left to the processor, which names them."""
    found: dict[int, str] = {}
    for task in tasks:
        if isinstance(task.prompt, str):
            found[id(task.prompt)] = task.prompt
        elif id(task.prompt) not in found:
            processor.prepare(task, "echo")  # raises for what is no token
            spell = token_bytes_of(processor)
            found[id(task.prompt)] = b"".join(map(spell, task.prompt)).decode("utf-8", "replace")
    return [found[id(task.prompt)] for task in tasks]
