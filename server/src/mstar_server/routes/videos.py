"""``/v1/videos``: jobs that make videos, and what they made; ``POST /v1/videos/generations``: a video to wait for."""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.tasks import VideoTask
from mstar_server.answers import cancel, start
from mstar_server.media.encode.video import VIDEO_TYPE
from mstar_server.openai.adapters import check_body
from mstar_server.openai.forms import read_body
from mstar_server.openai.video_request import REFERENCE, VideoAnswerRequest, VideoRequest, video_items
from mstar_server.openapi import answers, body_of
from mstar_server.protocols import Service
from mstar_server.state import ServerState
from mstar_server.videos.filming import film
from mstar_server.videos.jobs import VideoJobs, length_text
from mstar_server.videos.store import VARIANTS, VideoRecord

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])

MOST_RANGES = 16
"""Ranges of one request for a file; more would cost more than they are worth."""


@router.post(
    "/v1/videos",
    summary="Begin to make a video",
    openapi_extra=body_of(VideoRequest, (REFERENCE,)),
    response_model=None,
)
async def create_video(request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    _, service, task = await _task(request, VideoRequest)
    record = await state.videos.create(service, task, state.tenant(request))
    return _json(_object(record, state.videos))


@router.post(
    "/v1/videos/generations",
    summary="Make a video and wait for it",
    openapi_extra=body_of(VideoAnswerRequest, (REFERENCE,)),
    response_model=None,
    responses=answers("The video", "application/json", VIDEO_TYPE),
)
async def generate_video(request: Request) -> Response:
    body, service, task = await _task(request, VideoAnswerRequest)
    assert isinstance(body, VideoAnswerRequest)
    return await _waited_for(service, task, body.response_format == "mp4")


@router.get("/v1/videos", summary="The videos that were asked for", response_model=None)
async def list_videos(
    request: Request,
    limit: int = Query(20, ge=1, le=100),
    order: str = Query("desc", pattern="^(asc|desc)$"),
    after: str | None = None,
) -> Response:
    state: ServerState = request.app.state.mstar
    page, more = await state.videos.store.page(state.tenant(request), limit, after, order == "desc")
    data = [_object(record, state.videos) for record in page]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return _json({"object": "list", "data": data, **ends, "has_more": more})


@router.get("/v1/videos/{video_id}", summary="How far a video is", response_model=None)
async def get_video(video_id: str, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    return _json(_object(await state.videos.store.get(state.tenant(request), video_id), state.videos))


_CONTENT = tuple(media_type for _, media_type in VARIANTS.values())


@router.get(
    "/v1/videos/{video_id}/content",
    summary="A video, or pictures of it",
    response_model=None,
    responses=answers("The file", *_CONTENT) | answers("Ranges of it", *_CONTENT, "multipart/byteranges", status=206),
)
async def get_content(
    video_id: str, request: Request, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
) -> Response:
    state: ServerState = request.app.state.mstar
    record = await state.videos.store.get(state.tenant(request), video_id)
    if record.status != "completed":
        status, _ = state.videos.progress(record)
        message = f"the video {record.id!r} is {status}, so there is nothing to download"
        raise RequestError(message, code="video_not_completed")
    if request.headers.get("range", "").count(",") >= MOST_RANGES:
        message = f"'Range': at most {MOST_RANGES} ranges of a file at once"
        raise RequestError(message, param="Range", status=416)
    ending, media_type = VARIANTS[variant]
    return FileResponse(
        state.videos.store.file(record.id, variant), media_type=media_type, filename=f"{record.id}.{ending}"
    )


@router.delete("/v1/videos/{video_id}", summary="Forget a video; cancel it if it is being made", response_model=None)
async def delete_video(video_id: str, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    await state.videos.delete(state.tenant(request), video_id)
    return _json({"id": video_id, "object": "video.deleted", "deleted": True})


@router.post("/v1/videos/{video_id}/remix", summary="Not supported", response_model=None)
async def remix_video(video_id: str, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    await state.videos.store.get(state.tenant(request), video_id)
    message = "no model of this server remixes videos; ask for a new one: POST /v1/videos"
    raise RequestError(message, code="unsupported_operation")


async def _task(request: Request, cls: type[VideoRequest]) -> tuple[VideoRequest, Service, VideoTask]:
    """The body, the service that it names, and the task that it asks for."""
    state: ServerState = request.app.state.mstar
    body, uploads = await read_body(request, cls, (REFERENCE,), state.options)
    service = state.ready(body.model, "video")
    adapter = state.adapter("video", service)
    with family_code(f"{service.spec.key!r} could not read a request for a video", type(adapter).__module__):
        check_body(adapter, body)
        items = video_items(body, uploads, service.spec)
        media = dict(zip(items, await state.media.decode(list(items.values())), strict=True))
        return body, service, adapter.task(body, media)


async def _waited_for(service: Service, task: VideoTask, bare: bool) -> Response:
    """The whole video: the file itself if *bare*, else inside JSON."""
    name = f"video_{uuid.uuid4().hex}"
    handle, temporary = tempfile.mkstemp(suffix=".mp4", prefix="mstar-")
    os.close(handle)
    file = Path(temporary)
    try:
        answers = await start(service, [task], name)
        try:
            clip = await film(answers[0], file)
        finally:
            cancel(answers)
        size = f"{clip.width}x{clip.height}"
        if bare:
            return _Temporary(file, media_type=VIDEO_TYPE, filename=f"{name}.mp4")
        data = await asyncio.to_thread(_base64, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    file.unlink(missing_ok=True)
    facts = {"model": service.spec.key, "seconds": length_text(clip.seconds), "size": size}
    return _json({"id": name, "created": int(time.time()), **facts, "data": [{"b64_json": data}]})


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("ascii")


class _Temporary(FileResponse):
    """A file that is gone once it has been sent, or its client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)


def _object(record: VideoRecord, jobs: VideoJobs) -> dict[str, Any]:
    """The job as its client sees it."""
    status, progress = jobs.progress(record)
    ended = record.completed
    return {
        "id": record.id,
        "object": "video",
        "model": record.model,
        "status": status,
        "progress": progress,
        "created_at": int(record.created),
        "completed_at": int(ended) if ended is not None and status == "completed" else None,
        "expires_at": None if ended is None else int(ended + jobs.store.age_s),
        "prompt": record.prompt,
        "seconds": record.seconds,
        "size": record.size,
        "error": record.error,
        "remixed_from_video_id": None,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
