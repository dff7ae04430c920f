"""``POST /generate``: the native route, as a form or as JSON; the answer whole or in JSON lines."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.processor import Delta, TextDelta
from mstar.spec.tasks import GenerateTask
from mstar_server.answers import Merged, begin, cancel, start
from mstar_server.errors import as_request_error, error_event
from mstar_server.json_body import read_json
from mstar_server.media.uploads import open_form
from mstar_server.native.request import (
    GenerateBody,
    NativeRequest,
    as_sent,
    from_form,
    from_json,
    make_task,
    with_files,
)
from mstar_server.native.response import delta_object, done_object, is_heavy, whole_object
from mstar_server.openapi import answers, body_of
from mstar_server.options import ServerOptions
from mstar_server.protocols import Answer, Service
from mstar_server.sse import EventStream, json_line
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["native"])


@router.post(
    "/generate",
    summary="Ask a model for anything it can make",
    openapi_extra=body_of(GenerateBody, several=("files",)),
    response_model=None,
    responses=answers("All outputs, or one JSON line for each delta", "application/json", "application/x-ndjson"),
)
async def generate(request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    native = await _read(request, state.options)
    service = state.ready(native.model, "generate")
    task = make_task(native, service.spec)
    if native.uploads:
        task = await with_files(task, native, service.spec, state.media, await state.sampling(service))
    request_id = f"gen-{uuid.uuid4().hex}"
    with as_sent(service.spec.knobs):
        if not native.streaming:
            return await _whole(service, task, request_id)
        merged = await begin(service, [task], request_id, state.options.keepalive_s)
    lines = _lines(merged, service.spec.knobs, state.options.keepalive_s)
    return EventStream(lines, "application/x-ndjson", merged.close)


async def _read(request: Request, options: ServerOptions) -> NativeRequest:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in ("multipart/form-data", "application/x-www-form-urlencoded"):
        part_size = max(4 * options.max_text_chars, options.max_kwargs_bytes + 1)
        async with open_form(request, options, part_size) as form:
            return await from_form(form, options)
    if media_type != "application/json":
        message = f"send multipart/form-data or application/json, not {media_type or 'a body without Content-Type'!r}"
        raise RequestError(message, code="unsupported_media_type", status=415)
    return await asyncio.to_thread(from_json, await read_json(request), options)


async def _whole(service: Service, task: GenerateTask, request_id: str) -> Response:
    answers = await start(service, [task], request_id)
    answer = answers[0]
    try:
        deltas: list[Delta] = [delta async for delta in answer]
    finally:
        cancel(answers)
    heavy = not all(isinstance(delta, TextDelta) for delta in deltas)
    data = await asyncio.to_thread(_written, answer, deltas) if heavy else _written(answer, deltas)
    return Response(data, media_type="application/json")


def _written(answer: Answer, deltas: Sequence[Delta]) -> bytes:
    return msgspec.json.encode(whole_object(answer, deltas))


async def _lines(merged: Merged, knobs: type[Knobs], keepalive_s: float) -> AsyncGenerator[bytes, None]:
    counts: Counter[str] = Counter()
    try:
        with as_sent(knobs):
            while not merged.done:
                batch = await merged.next_batch(keepalive_s)
                lines = [] if batch else [json_line({"type": "keepalive"})]
                for _, delta in batch:
                    if delta is None:
                        lines.append(json_line(done_object(merged.answers[0])))
                        continue
                    index = counts[delta.stream]
                    counts[delta.stream] += 1
                    line = partial(_line, delta, index)
                    lines.append(await asyncio.to_thread(line) if is_heavy(delta) else line())
                yield b"".join(lines)
    except Exception as error:  # the status line is out: the error becomes the last line
        yield json_line(error_event(as_request_error(error)))


def _line(delta: Delta, index: int) -> bytes:
    return json_line(delta_object(delta, index))
