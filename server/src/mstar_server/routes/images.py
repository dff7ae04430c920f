"""``POST /v1/images/generations`` and ``POST /v1/images/edits``."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.runtime.family import family_code
from mstar.spec.tasks import Task
from mstar_server.answers import Merged, begin
from mstar_server.errors import as_request_error, error_event
from mstar_server.openai.adapters import check_body
from mstar_server.openai.forms import read_body
from mstar_server.openai.image_request import ImageEditRequest, ImageRequest, as_sent, image_items
from mstar_server.openai.image_response import ImageEvents, ImageFiles, images_response
from mstar_server.openai.text_answers import check_room, read
from mstar_server.openapi import answers, body_of
from mstar_server.parts import PartsResponse
from mstar_server.protocols import Service
from mstar_server.sse import EventStream, named_event
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])

_FILES = ("image", "mask")
_ANSWERS = answers("Pictures, or events as they are made", "application/json", "text/event-stream")


@router.post(
    "/v1/images/generations",
    summary="Make pictures from words",
    openapi_extra=body_of(ImageRequest),
    response_model=None,
    responses=_ANSWERS,
)
async def generations(request: Request) -> Response:
    return await _answer(request, ImageRequest, (), "image", "image_generation")


@router.post(
    "/v1/images/edits",
    summary="Make pictures from words and pictures",
    openapi_extra=body_of(ImageEditRequest, _FILES),
    response_model=None,
    responses=_ANSWERS,
)
async def edits(request: Request) -> Response:
    return await _answer(request, ImageEditRequest, _FILES, "image_edit", "image_edit")


async def _answer(request: Request, cls: type[ImageRequest], files: Sequence[str], ability: str, kind: str) -> Response:
    state: ServerState = request.app.state.mstar
    body, uploads = await read_body(request, cls, files, state.options)
    service = state.ready(body.model, ability)
    adapter = state.adapter(ability, service)
    with family_code(f"{service.spec.key!r} could not read a request for pictures", type(adapter).__module__):
        check_body(adapter, body)
        items = image_items(body, uploads, service.spec)
        check_room(service, body.n or 1, "n")
        media = dict(zip(items, await state.media.decode(list(items.values())), strict=True))
        tasks = adapter.tasks(body, media)
    name = f"img-{uuid.uuid4().hex}"
    with as_sent(items):
        if not body.stream:
            return await _whole(service, tasks, name, body)
        merged = await begin(service, tasks, name, state.options.keepalive_s, samples=1)
    events = _events(merged, ImageEvents(kind, body), state.options.keepalive_s)
    return EventStream(events, "text/event-stream", merged.close)


async def _whole(service: Service, tasks: Sequence[Task], name: str, body: ImageRequest) -> Response:
    answers, files = await read(service, tasks, name, ImageFiles(body).read, samples=1)
    return PartsResponse(images_response(body, answers, files), "application/json")


async def _events(merged: Merged, events: ImageEvents, keepalive_s: float) -> AsyncGenerator[bytes, None]:
    try:
        while not merged.done:
            batch: Sequence[tuple[int, Any]] = await merged.next_batch(keepalive_s)
            if not batch:
                yield events.keepalive()
            work = [
                events.finish(which, merged.answers[which]) if delta is None else events.delta(which, delta)
                for which, delta in batch
            ]
            making = [asyncio.to_thread(make) for make in work if make is not None]
            for data in await asyncio.gather(*making, return_exceptions=True):
                if isinstance(data, BaseException):  # what was made before it is not lost
                    raise data
                yield data
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        yield named_event(error_event(as_request_error(error)))
