"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.runtime.family import family_code
from mstar_server.openai.adapters import check_body
from mstar_server.openai.chat_media import chat_tasks
from mstar_server.openai.chat_request import ChatRequest
from mstar_server.openai.chat_response import ChatChunks, chat_completion
from mstar_server.openai.chat_voice import SOUND_FORMATS
from mstar_server.openai.speakers import known_voice
from mstar_server.openai.text_answers import Head, respond, token_bytes_of
from mstar_server.openapi import answers
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["OpenAI"],
    summary="Answer a chat",
    response_model=None,
    responses=answers("A chat completion, or its chunks", "application/json", "text/event-stream"),
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "chat")
    adapter = state.adapter("chat", service)
    reading = f"{service.spec.key!r} could not read a chat"
    with family_code(reading, type(adapter).__module__):
        check_body(adapter, body)
    sound = None
    if body.audio is not None:
        sound = SOUND_FORMATS[body.audio.format]
        await known_voice(body.audio.voice_name, service.spec, await state.processor(service), "audio.voice")
    token_bytes = token_bytes_of(await state.processor(service)) if body.logprobs else None
    with family_code(reading, type(adapter).__module__):
        tasks = await chat_tasks(adapter, body, service.spec, state.media, await state.sampling(service))
    head = Head.of(service, "chatcmpl")
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return await respond(
        request,
        service,
        tasks,
        head,
        samples=len(tasks),
        whole=partial(chat_completion, token_bytes=token_bytes, sound=sound),
        chunks=ChatChunks(head, usage, token_bytes, sound) if body.stream else None,
    )
