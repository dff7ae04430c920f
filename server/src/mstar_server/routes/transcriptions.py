"""``POST /v1/audio/transcriptions`` and ``POST /v1/audio/translations``."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import closing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.processing.speech.transcript import Transcript, TranscriptBuilder
from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar_server.media.decoder import Item
from mstar_server.media.source import Source
from mstar_server.openai.adapters import check_body
from mstar_server.openai.forms import read_body
from mstar_server.openai.text_answers import token_bytes_of
from mstar_server.openai.transcribing import WindowRun, heard
from mstar_server.openai.transcription_request import TranscriptionRequest, TranslationRequest
from mstar_server.openai.transcription_response import events, whole
from mstar_server.openapi import answers, body_of
from mstar_server.sse import EventStream
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])


_FORMATS = ("application/json", "text/plain", "text/vtt", "application/x-subrip")


@router.post(
    "/v1/audio/transcriptions",
    summary="Speech to text",
    openapi_extra=body_of(TranscriptionRequest, ("file",), required=("file",), as_json=False),
    response_model=None,
    responses=answers("A transcript, or its events", *_FORMATS, "text/event-stream"),
)
async def transcriptions(request: Request) -> Response:
    return await _answer(request, TranscriptionRequest, "transcription")


@router.post(
    "/v1/audio/translations",
    summary="Speech to English text",
    openapi_extra=body_of(TranslationRequest, ("file",), required=("file",), as_json=False),
    response_model=None,
    responses=answers("A transcript", *_FORMATS),
)
async def translations(request: Request) -> Response:
    return await _answer(request, TranslationRequest, "translation")


async def _answer(request: Request, cls: type[TranslationRequest], ability: str) -> Response:
    state: ServerState = request.app.state.mstar
    body, source = await _read(request, cls, state)
    service = state.ready(body.model, ability)
    adapter = state.adapter(ability, service)
    translate = ability == "translation"
    with family_code(f"{service.spec.key!r} could not read a clip", type(adapter).__module__):
        check_body(adapter, body)
        (audio,) = await state.media.decode([Item("audio", source, "file")])
        assert isinstance(audio, Audio)
        (task,) = adapter.tasks(body, {"file": audio}, translate=translate)
    with closing(service.hold()):  # a model is not unloaded between its processor's load and the first window
        processor = await state.processor(service)
        spell = None if task.logprobs is None else token_bytes_of(processor)
        with family_code(f"{service.spec.key!r} could not cut a clip", service.spec.processor):
            windows: list[TranscriptionTask] = list(await asyncio.to_thread(processor.windows, task))
        builder = TranscriptBuilder(len(audio.samples) / audio.rate)
        run = WindowRun(service, windows, f"trsc-{uuid.uuid4().hex}")
    if body.streamed:
        silence_s = state.options.keepalive_s
        try:
            await run.begin(silence_s)
        except BaseException:
            run.close()
            raise
        said = events(run, builder, silence_s, segments="segment" in task.timestamps, spell=spell)
        return EventStream(said, "text/event-stream", run.close)
    transcript = await _heard(run, builder, body.language)
    kind = "translate" if translate else "transcribe"
    return whole(transcript, body.response_format, task=kind, timestamps=task.timestamps, spell=spell)


async def _read(request: Request, cls: type[TranslationRequest], state: ServerState) -> tuple[Any, Source]:
    """The fields of *request*'s form, and its file."""
    body, uploads = await read_body(request, cls, ("file",), state.options, lists=cls.lists, as_json=False)
    files = uploads.get("file", [])
    if not files:
        raise RequestError("'file' is required", param="file", code="missing_required_parameter")
    if len(files) > 1:
        raise RequestError("'file': one file a request", param="file")
    return body, files[0]


async def _heard(run: WindowRun, builder: TranscriptBuilder, language: str | None) -> Transcript:
    try:
        async for _ in heard(run, builder):
            pass
        return builder.result(language)
    finally:
        run.close()
