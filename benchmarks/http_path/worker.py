"""A worker without a model: each step gives every request one token, within its window. What is left is the path."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import mstar
from mstar.cluster.base import WorkerConfig
from mstar.cluster.processes import ProcessesExecutor
from mstar.spec.request import Cancel, Done, Emit, EngineRequest, Event, Push, Usage

__all__ = ["PathExecutor", "PathWorker", "no_registry"]

WINDOW = 64
"""Emissions that a request may be ahead of its client's acks."""


def no_registry(config: WorkerConfig) -> None:
    """The worker needs none."""


@dataclass
class _Run:
    tokens: int
    sent: int = 0
    taken: int = 0


class PathWorker:
    """``HTTP_COST_STEP_S`` in the environment: the least time of a step; 0 gives tokens as fast as they go."""

    def __init__(self, config: WorkerConfig, registry: Any, on_phase: Any):
        self._step_s = float(os.environ.get("HTTP_COST_STEP_S", "0"))
        self._runs: dict[str, _Run] = {}
        self._events: list[Event] = []
        self._next = 0.0

    def submit(self, request: EngineRequest) -> None:
        self._runs[request.id] = _Run(request.sampling["sampler"].max_tokens)

    def push(self, push: Push) -> None:
        raise NotImplementedError

    def cancel(self, cancel: Cancel) -> None:
        if self._runs.pop(cancel.id, None) is not None:
            self._events.append(Done(id=cancel.id, reason=cancel.reason))

    def ack(self, request: str, stream: str, items: int) -> None:
        if (run := self._runs.get(request)) is not None:
            run.taken += items

    def step(self) -> bool:
        if not self._runs:
            return False
        if self._step_s:
            time.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._step_s
        ended = []
        for name, run in self._runs.items():
            if run.sent - run.taken >= WINDOW:
                continue
            self._events.append(Emit(id=name, stream="text", seq=run.sent, data=[5 + run.sent % 40]))
            run.sent += 1
            if run.sent == run.tokens:
                usage = Usage(output={"tokens": run.sent}, run_s=1e-3)
                self._events.append(Done(id=name, reason="length", usage=usage))
                ended.append(name)
        for name in ended:
            del self._runs[name]
        return bool(self._events)

    def next_deadline(self) -> float | None:
        return time.monotonic() + 0.001 if self._runs else None

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def status(self) -> dict[str, Any]:
        return {"running": len(self._runs), "waiting": 0, "sessions": 0, "resources": {}}

    def close(self) -> None:
        self._runs.clear()


class PathExecutor(ProcessesExecutor):
    """The worker above, in a process of its own as any other."""

    def __init__(self, *arguments: Any):
        here = PathWorker.__module__
        super().__init__(*arguments, worker_factory=f"{here}:PathWorker", registry_factory=f"{here}:no_registry")


@mstar.hookimpl
def mstar_executors() -> dict[str, str]:
    return {"path": f"{__name__}:PathExecutor"}
