"""API sides: a sound one, and some that are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from mstar.spec.errors import RequestError
from mstar.spec.processor import Prepared, Renderer
from mstar.spec.request import Emit
from mstar.spec.tasks import ChatTask, GenerateTask, Task
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer, encode, text_of


class Sound(MiniProcessor):
    """Text in, text out."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return MiniRenderer({"text": "text"}, task)


class NoChat(Sound):
    """Does not do what its spec declares."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, ChatTask):
            raise RequestError("no chats here", code="unsupported_task")
        return super().prepare(task, request_id)


class OtherId(Sound):
    """Gives the request an id of its own."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        return super().prepare(task, request_id + "x")


class NoSeed(Sound):
    """Drops the request's seed."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        prepared = super().prepare(task, request_id)
        sampling = {name: msgspec.structs.replace(p, seed=None) for name, p in prepared.request.sampling.items()}
        prepared.request.sampling = sampling
        return prepared


class Short(Sound):
    """Its context is shorter than what its knobs ask for."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if task.knobs.max_tokens > 100:
            raise RequestError("more than the context of 100 tokens", param="max_tokens")
        return super().prepare(task, request_id)


class IgnoresMedia(Sound):
    """Drops what it cannot read without a word."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if isinstance(task, GenerateTask):
            task = replace(task, parts=())
        return super().prepare(task, request_id)


class Raises(Sound):
    """Trips over a text without a word in it."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        _first_word = text_of(task).split()[0]
        return super().prepare(task, request_id)


class NamesNoField(Sound):
    """Refuses, but does not say what."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        try:
            return super().prepare(task, request_id)
        except RequestError as error:
            raise RequestError(str(error)) from None


class TakesEmpty(Sound):
    """Lets everything through."""

    def inputs(self, task: Task) -> dict[str, Any]:
        return {"prompt": np.array(encode(text_of(task) or "."), dtype=np.int64)}


class Breaks(Sound):
    """Breaks off in the middle of the answer."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return _Breaking({"text": "text"}, task)


class _Breaking(MiniRenderer):
    def feed(self, event: Emit):  # type: ignore[no-untyped-def]
        if event.seq == 1:
            raise ValueError("no more")
        return super().feed(event)


class IgnoresStop(Sound):
    """Its renderer never hears of stop strings."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return MiniRenderer({"text": "text"}, replace(task, stop=()))


class GoesOn(Sound):
    """Cuts its text at a stop string, and lets the request run on."""

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return _GoingOn({"text": "text"}, task)


class _GoingOn(MiniRenderer):
    def feed(self, event: Emit):  # type: ignore[no-untyped-def]
        yield from super().feed(event)
        self.finished = None


class RefusesStop(Sound):
    """Sound: it has no stop strings, and says so."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if task.stop:
            raise RequestError("stop strings mean nothing here", param="stop")
        return super().prepare(task, request_id)


class CountsNothing(Sound):
    """Leaves the prompt out of its usage."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        return replace(super().prepare(task, request_id), prompt_tokens=0)


class CountsMessages(Sound):
    """Takes a prompt for one token, however long it is."""

    def prepare(self, task: Task, request_id: str) -> Prepared:
        return replace(super().prepare(task, request_id), prompt_tokens=1)
