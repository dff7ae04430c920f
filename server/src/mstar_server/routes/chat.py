"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar import __version__
from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.processor import TextDelta
from mstar.spec.tasks import Task
from mstar_server.answers import Merged, begin, cancel, start
from mstar_server.errors import as_request_error, error_object
from mstar_server.openai.chat_request import ChatRequest
from mstar_server.openai.chat_response import (
    ChatChunks,
    Head,
    chat_completion,
    finish_reason,
    token_bytes_of,
    usage_object,
)
from mstar_server.protocols import Answer, Service
from mstar_server.sse import DONE, EventStream, data_event
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions", tags=["OpenAI"], summary="Answer a chat", response_model=None)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "chat")
    adapter = state.adapter("chat", service)
    with family_code(f"{service.spec.key!r} could not read a chat", type(adapter).__module__):
        if any(isinstance(message.content, list) for message in body.messages):
            tasks = await asyncio.to_thread(adapter.tasks, body)  # parts may be media, which take time to decode
        else:
            tasks = adapter.tasks(body)
    _check_choices(service, len(tasks))
    head = Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), service.spec.key, fingerprint(service.spec))
    if not body.stream:
        return await _whole(service, tasks, head, bool(body.logprobs))
    usage = bool(body.stream_options and body.stream_options.include_usage)
    merged = await begin(service, tasks, head.id, state.options.keepalive_s)
    chunks = ChatChunks(head, usage, token_bytes_of(service.processor) if body.logprobs else None)
    stream = _stream(merged, chunks, usage, state.options.keepalive_s)
    return EventStream(stream, "text/event-stream", merged.close)


def _check_choices(service: Service, choices: int) -> None:
    """More choices than the model can ever hold at once would be "too busy" for ever."""
    limits = service.limits
    most = limits.get("max_concurrent_requests", choices) + limits.get("max_queue", 0)
    if choices > most:
        raise RequestError(f"'n' is {choices}; this server takes at most {most} choices at once", param="n")


def fingerprint(spec: ModelSpec) -> str:
    """Changes when what could change an answer changes: the software's version, the model, its weights' revision."""
    facts = (__version__, spec.key, *((ref.id, ref.revision) for ref in spec.weights))
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]


async def _whole(service: Service, tasks: Sequence[Task], head: Head, logprobs: bool) -> Response:
    answers = await start(service, tasks, head.id)
    try:
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(_collect(answer)) for answer in answers]
    except* Exception as errors:
        raise _first(errors) from None
    finally:
        cancel(answers)
    deltas = [reader.result() for reader in readers]
    token_bytes = token_bytes_of(service.processor) if logprobs else None
    return Response(chat_completion(head, answers, deltas, token_bytes), media_type="application/json")


async def _collect(answer: Answer) -> list[TextDelta]:
    return [delta async for delta in answer if isinstance(delta, TextDelta)]


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _stream(merged: Merged, chunks: ChatChunks, usage: bool, keepalive_s: float) -> AsyncGenerator[bytes, None]:
    try:
        yield b"".join(chunks.role(index) for index in range(len(merged.answers)))
        while not merged.done:
            batch = await merged.next_batch(keepalive_s)
            parts = [] if batch else [chunks.keepalive]
            for index, delta in batch:
                if delta is None:
                    parts.append(chunks.finish(index, finish_reason(merged.answers[index].finish_reason)))
                elif isinstance(delta, TextDelta) and (delta.text or delta.logprobs):
                    parts.append(chunks.text(index, delta))
            if parts:
                yield b"".join(parts)
        if usage:
            yield chunks.usage(usage_object(merged.answers))
        yield DONE
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        yield data_event(error_object(as_request_error(error)))
