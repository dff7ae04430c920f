"""Running video jobs: each is a request to the engine that outlives the one that asked for it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.tasks import VideoTask
from mstar_server.answers import cancel, start
from mstar_server.errors import as_request_error, error_object
from mstar_server.exchange import current
from mstar_server.protocols import Answer, Service
from mstar_server.videos.filming import film
from mstar_server.videos.store import VideoRecord, VideoStore

__all__ = ["VideoJobs", "length_text"]

log = logging.getLogger("mstar.server")

REFUSAL_S = 0.1
"""How long a new job is watched for a refusal (a full queue), which is answered with its status instead of a job."""


class VideoJobs:
    """The jobs that run, and the store of all.

    :param most_running: more are answered 429. :param longest_s: seconds that a job may take, queue included.
    """

    def __init__(self, store: VideoStore, most_running: int, longest_s: float):
        self.store, self._most_running, self._longest_s = store, most_running, longest_s
        self._running: dict[str, _Job] = {}
        self._starting = 0

    async def create(self, service: Service, task: VideoTask, tenant: str) -> VideoRecord:
        """Start a job. Raises :class:`RequestError` when the model refuses the task, or there are too many.

        It counts as one of its caller's requests until it ends.
        """
        if len(self._running) + self._starting >= self._most_running:
            raise TooBusy(f"{self._most_running} videos are being made, which is the limit; try again later")
        self._starting += 1
        try:
            job = await self._start(service, task, tenant)
        finally:
            self._starting -= 1
        await job.watch_refusal()
        return job.record

    async def _start(self, service: Service, task: VideoTask, tenant: str) -> _Job:
        video_id = f"video_{uuid.uuid4().hex}"
        record = VideoRecord(
            video_id, tenant, service.spec.key, task.prompt, _seconds_asked(task), _size_text(task.size)
        )
        (answer,) = await start(service, [replace(task, timeout=self._longest_s)], video_id, outlives=True)
        try:
            await self.store.add(record)
        except BaseException:
            cancel([answer])
            raise
        exchange = current()
        leave = _nothing if exchange is None else exchange.hand_over()
        job = self._running[video_id] = _Job(self, record, answer, leave)
        job.begin()
        return job

    async def get(self, tenant: str, video_id: str) -> VideoRecord:
        """:raises RequestError: 404."""
        return await self.store.get(tenant, video_id)

    def progress(self, record: VideoRecord) -> tuple[str, int]:
        """The status of *record* now, and how much is done, 0…100; 100 is kept for the end."""
        job = self._running.get(record.id)
        if job is None or record.completed is not None:
            return record.status, 100 if record.status == "completed" else 0
        return ("in_progress" if job.begun else "queued"), min(99, int(100 * job.share))

    async def delete(self, tenant: str, video_id: str) -> None:
        """Forget a video; one that is still being made is cancelled first. :raises RequestError: 404."""
        await self.store.get(tenant, video_id)
        job = self._running.get(video_id)
        if job is not None:
            await job.stop()
        await self.store.delete(tenant, video_id)

    async def close(self) -> None:
        """Stop what runs, which is marked failed; what has only to be written down is."""
        await asyncio.gather(*(job.end("the server was stopped") for job in list(self._running.values())))
        self.store.close()

    def forget(self, video_id: str) -> None:
        self._running.pop(video_id, None)


def _nothing() -> None:
    """For a job that nobody counts."""


class _Job:
    """:param leave: called when it has ended.

    :ivar begun: the model has said something. :ivar share: how much is done, 0…1.
    """

    def __init__(self, jobs: VideoJobs, record: VideoRecord, answer: Answer, leave: Callable[[], None]):
        self.jobs, self.record, self.answer, self._leave = jobs, record, answer, leave
        self.begun, self.share = False, 0.0
        self._task: asyncio.Task[None] | None = None
        self._refused: RequestError | None = None
        self._why = ""

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: self._leave())  # also of one that is cancelled before it begins

    async def watch_refusal(self) -> None:
        """Raise the error of a job that is refused at once; nothing is kept of it."""
        assert self._task is not None
        await asyncio.wait((self._task,), timeout=REFUSAL_S)
        if self._refused is not None:
            await self.jobs.store.delete(self.record.tenant, self.record.id)
            raise self._refused

    async def stop(self, why: str = "the video has been cancelled") -> None:
        """Cancel it in the engine, and wait until nothing of it runs."""
        self._why = why
        cancel([self.answer])
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def end(self, why: str) -> None:
        """:meth:`stop`, unless the model is done."""
        if self.answer.finish_reason is None or self._task is None:
            await self.stop(why)
        else:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        store, record = self.jobs.store, self.record
        files = (
            store.file(record.id, "video"), store.file(record.id, "thumbnail"), store.file(record.id, "spritesheet"),
        )  # fmt: skip
        try:
            clip = await film(self.answer, *files, self._on_progress)
            self._leave()  # before anybody can see that it has ended, and begin the next one
            size = sum(file.stat().st_size for file in files)
            await self._note(
                status="completed", completed=time.time(), bytes=size, size=_size_text((clip.width, clip.height)),
                seconds=length_text(clip.seconds),
            )  # fmt: skip
        except asyncio.CancelledError:
            await self._fail(RequestError(self._why or "the video has been cancelled", code="cancelled"))
            raise
        except Exception as error:
            fault = as_request_error(error)
            if fault.status == 429 and not self.begun:
                self._refused = fault
            await self._fail(fault)
        finally:
            cancel([self.answer])
            self.jobs.forget(record.id)

    def _on_progress(self, share: float) -> None:
        self.begun, self.share = True, max(self.share, share)

    async def _fail(self, fault: RequestError) -> None:
        self._leave()
        said = error_object(fault)["error"]
        await self._note(
            status="failed", completed=time.time(), error={"code": said["code"], "message": said["message"]}
        )

    async def _note(self, **changes: Any) -> None:
        self.record = await self.jobs.store.update(self.record, **changes)


def _seconds_asked(task: VideoTask) -> str:
    return "auto" if task.seconds is None else length_text(task.seconds)


def length_text(seconds: float) -> str:
    """Seconds as OpenAI writes them: ``"4"``; a part of one to a thousandth."""
    return f"{round(seconds, 3):g}"


def _size_text(size: Sequence[int] | None) -> str:
    return "auto" if size is None else f"{size[0]}x{size[1]}"
