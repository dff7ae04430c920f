"""API sides: a sound one, and some that are not."""

from __future__ import annotations

import msgspec

from mstar.spec.errors import RequestError
from mstar.spec.processor import Prepared, Renderer
from mstar.spec.request import Emit
from mstar.spec.tasks import ChatTask, Task
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer


class Sound(MiniProcessor):
    """Text in, text out."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return MiniRenderer({"text": "text"})


class NoChat(Sound):
    """Does not do what its spec declares."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, ChatTask):
            raise RequestError("no chats here", code="unsupported_task")
        return super().prepare(task, request_id)


class NoSeed(Sound):
    """Drops the request's seed."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        prepared = super().prepare(task, request_id)
        sampling = {name: msgspec.structs.replace(p, seed=None) for name, p in prepared.request.sampling.items()}
        prepared.request.sampling = sampling
        return prepared


class Breaks(Sound):
    """Breaks off in the middle of the answer."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return _Breaking({"text": "text"})


class _Breaking(MiniRenderer):
    def feed(self, event: Emit):  # type: ignore[no-untyped-def]
        if event.seq == 1:
            raise ValueError("no more")
        return super().feed(event)
