"""A worker without a model: a while after a request came it gives a picture of noise, which compresses worst."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import mstar
from mstar.cluster.base import WorkerConfig
from mstar.cluster.processes import ProcessesExecutor
from mstar.spec.request import Cancel, Done, Emit, EngineRequest, Event, Push, Usage

__all__ = ["Painter", "PainterExecutor", "no_registry"]

SIDE = 1024


def no_registry(config: WorkerConfig) -> None:
    """The worker needs none."""


class Painter:
    """``IMAGE_PATH_WORK_S`` in the environment: how long a picture takes."""

    def __init__(self, config: WorkerConfig, registry: Any, on_phase: Any):
        self._work_s = float(os.environ.get("IMAGE_PATH_WORK_S", "0.05"))
        self._due: dict[str, float] = {}
        self._events: list[Event] = []
        self._picture = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)

    def submit(self, request: EngineRequest) -> None:
        self._due[request.id] = time.monotonic() + self._work_s

    def push(self, push: Push) -> None:
        raise NotImplementedError

    def cancel(self, cancel: Cancel) -> None:
        if self._due.pop(cancel.id, None) is not None:
            self._events.append(Done(id=cancel.id, reason=cancel.reason))

    def ack(self, request: str, stream: str, items: int) -> None:
        """One picture is never too much."""

    def step(self) -> bool:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._events.append(Emit(id=name, stream="image", seq=0, data=self._picture))
            self._events.append(Done(id=name, reason="stop", usage=Usage(output={"images": 1}, run_s=self._work_s)))
        return bool(self._events)

    def next_deadline(self) -> float | None:
        return min(self._due.values(), default=None)

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def status(self) -> dict[str, Any]:
        return {"running": len(self._due), "waiting": 0, "sessions": 0, "resources": {}}

    def close(self) -> None:
        self._due.clear()


class PainterExecutor(ProcessesExecutor):
    """The worker above, in a process of its own as any other."""

    def __init__(self, *arguments: Any):
        here = Painter.__module__
        super().__init__(*arguments, worker_factory=f"{here}:Painter", registry_factory=f"{here}:no_registry")


@mstar.hookimpl
def mstar_executors() -> dict[str, str]:
    return {"painter": f"{__name__}:PainterExecutor"}
