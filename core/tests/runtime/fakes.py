"""A family for tests: its processor counts or echoes, its renderer spells numbers."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from mstar.cluster.base import WorkerConfig
from mstar.cluster.inline import InlineExecutor
from mstar.cluster.processes import ProcessesExecutor
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import RequestError
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import ArrayDelta, Delta, Intake, Prepared, Processor, ProcessorContext, Renderer, TextDelta
from mstar.spec.request import Done, Emit, EngineRequest, Push
from mstar.spec.tasks import Audio, ChatTask, GenerateTask, Task


class FakeKnobs(Knobs):
    count: int = Field(3, ge=0)
    misbehave: str = ""


class FakeOptions(Knobs):
    """Those of the processor; the worker takes any."""

    model_config = ConfigDict(extra="allow")

    bad_tokenizer: str = ""


class Adder(Intake):
    """Sends on the sums of all that came."""

    def __init__(self) -> None:
        self.sum = 0.0

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        if part is not None:
            self.sum += float(np.sum(part.samples if isinstance(part, Audio) else part))
        return Push(id=request_id, stream=stream, data=None if part is None else np.array([self.sum]), end=end)


class FakeProcessor(Processor):
    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        if context.options.bad_tokenizer:
            raise FileNotFoundError(context.options.bad_tokenizer)

    def prepare(self, task: Task, request_id: str) -> Prepared:
        knobs = task.knobs
        if knobs.misbehave == "refuse":
            raise RequestError("no such voice", param="voice")
        if knobs.misbehave == "prepare":
            int("no number")
        if knobs.misbehave == "slow":
            time.sleep(0.2)
        request = EngineRequest(id=request_id, params={"count": knobs.count})
        if knobs.misbehave in ("raise", "exit"):
            request.params[knobs.misbehave] = True
        if isinstance(task, GenerateTask):
            request.client_streams = task.live
            if task.parts:
                request.inputs["echo"] = np.zeros(4)
        return Prepared(request, prompt_tokens=7, intake=Adder() if knobs.misbehave == "remember" else None)

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return FakeRenderer(task)

    def push(self, stream: str, part: Any, request_id: str, end: bool = False) -> Push:
        return super().push(stream, part["data"] if isinstance(part, dict) else part, request_id, end)


class FakeRenderer(Renderer):
    """Numbers as ``"0 "``, ``"1 "``…; every second delta waits for the next; a stop string ends the answer."""

    def __init__(self, task: Task):
        self.task, self.held = task, ""

    def feed(self, event: Emit) -> Iterable[Delta]:
        if self.task.knobs.misbehave == "render":
            raise ValueError("cannot spell")
        if not isinstance(event.data, list):
            return [ArrayDelta(event.data)]
        text = "".join(f"{number} " for number in event.data)
        if any(stop in text for stop in self.task.stop):
            self.finished = "stop"
            return ()
        self.held += text
        return self._flush() if event.seq % 2 else ()

    def finish(self, done: Done | None) -> Iterable[Delta]:
        return self._flush() if self.held else ()

    def _flush(self) -> list[Delta]:
        text, self.held = self.held, ""
        return [TextDelta(text, tuple(int(word) for word in text.split()))]


SPEC = ModelSpec(
    key="fake",
    family="fake",
    summary="Counts.",
    weights=(),
    licence=Licence("Apache-2.0"),
    model="fakes:Never",
    processor="fakes:FakeProcessor",
    abilities=("chat", "generate"),
    knobs=FakeKnobs,
    options=FakeOptions,
)


class FakeRegistry:
    """What a service asks of the registry."""

    def require(self, hook: str, name: str) -> None:
        """Whatever is asked for is there."""

    def executor(self, name: str) -> Any:
        if name == "inline":
            return functools.partial(InlineExecutor, worker_factory="fake_worker:FakeWorker")
        return functools.partial(
            ProcessesExecutor,
            worker_factory="fake_worker:FakeWorker",
            registry_factory="fake_worker:no_registry",
            restart_delay_s=0.01,
        )


def fake_config(**layer: Any) -> WorkerConfig:
    return WorkerConfig(key="fake", weights=None, deployment=merge_deployment("fake", {"executor": "inline", **layer}))


def counting(count: int = 3, misbehave: str = "", **fields: Any) -> ChatTask:
    return ChatTask(knobs=FakeKnobs(count=count, misbehave=misbehave), messages=(), **fields)


def live(misbehave: str = "", **fields: Any) -> GenerateTask:
    return GenerateTask(knobs=FakeKnobs(misbehave=misbehave), live=("in",), **fields)
