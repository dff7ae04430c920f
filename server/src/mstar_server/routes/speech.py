"""``POST /v1/audio/speech``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.processing.sentences import sentences
from mstar.runtime.family import family_code
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Processor
from mstar.spec.tasks import SpeechTask
from mstar_server.answers import Merged
from mstar_server.media.encode.audio import AUDIO_TYPES
from mstar_server.openai import speech_response
from mstar_server.openai.speakers import speaker
from mstar_server.openai.speech_request import Delivery, SpeechRequest, delivery
from mstar_server.openai.text_answers import Head
from mstar_server.openapi import answers
from mstar_server.spoken import Spoken
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()


@router.post(
    "/v1/audio/speech",
    tags=["OpenAI"],
    summary="Speak a text",
    response_model=None,
    responses=answers("A sound file, or its events", *AUDIO_TYPES.values(), "text/event-stream"),
)
async def create_speech(body: SpeechRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "speech")
    how = delivery(body)
    adapter = state.adapter("speech", service)
    with family_code(f"{service.spec.key!r} could not read a request for speech", type(adapter).__module__):
        adapter.tasks(body, None)  # what is wrong with the rest is said before a clip is fetched and decoded
    with closing(service.hold()):  # a model is not unloaded between its processor's load and the first piece
        processor = await state.processor(service)
        with family_code(f"{service.spec.key!r} could not read a request for speech", type(adapter).__module__):
            found = await speaker(body, service.spec, processor, state.media, state.voices, state.tenant(request))
            (task,) = adapter.tasks(body, found)
        tasks = await asyncio.to_thread(_pieces, service.spec, processor, task, body.sentence_chunking)
        spoken = Spoken(service, tasks, Head.of(service, "speech").id, state.options.speech_ahead)
    return await _respond(spoken, body.format, how, state.options.keepalive_s)


def _pieces(spec: ModelSpec, processor: Processor, task: SpeechTask, chunking: bool | None) -> Sequence[SpeechTask]:
    if chunking is False:
        return [task]
    with family_code(f"{spec.key!r} could not divide a text", spec.processor):
        pieces = processor.pieces
        if not chunking:
            return pieces(task)
        language = getattr(task.knobs, "language", None)
        texts = sentences(task.text, language if isinstance(language, str) else None)
        return [piece for text in texts for piece in pieces(replace(task, text=text))]


async def _respond(spoken: Spoken, name: str, how: Delivery, keepalive_s: float) -> Response:
    await spoken.begin()
    merged = Merged([spoken])
    try:
        if how == "whole":
            response = await speech_response.whole(merged, name)
            merged.close()
        elif how == "raw":
            response = await speech_response.raw(merged, name)
        else:
            response = await speech_response.events(merged, name, keepalive_s)
    except BaseException:
        merged.close()
        raise
    return response
