"""A scripted worker with the interface of ``mstar.worker.core.Worker``; importable by name in a child process.

A request counts up to ``params["count"]`` on stream ``out``, one number a step and at most ``window`` numbers ahead of
the client's acks. Its other behaviours are asked for by parameter and described where they are read.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mstar.cluster.base import Phase, WorkerConfig
from mstar.spec.errors import SetupError
from mstar.spec.request import Cancel, Done, Emit, EngineRequest, Event, Failed, Push, Usage


def no_registry(config: WorkerConfig) -> None:
    """Stands in for ``mstar.cluster.child:build_registry``."""


@dataclass
class _Run:
    request: EngineRequest
    sent: int = 0
    acked: int = 0
    pushed: list[Push] = field(default_factory=list)


class FakeWorker:
    def __init__(self, config: WorkerConfig, registry: Any, on_phase: Any):
        options = config.deployment.model_kwargs
        if sentence := options.get("setup_error"):
            raise SetupError(sentence)
        if options.get("bug_in_setup"):
            raise ZeroDivisionError("one over nothing")
        if options.get("exit_in_setup"):
            os._exit(9)
        marker = options.get("fail_second_start")  # a file: exists from the first start on
        if marker is not None:
            if Path(marker).exists() and not Path(marker + ".done").exists():
                Path(marker + ".done").touch()
                raise SetupError("the weights are gone for a moment")
            Path(marker).touch()
        on_phase(Phase(name="weights", progress=0.5))
        on_phase(Phase(name="warmup"))
        self.registry, self.window, self.limit = registry, options.get("window", 4096), options.get("limit", 100)
        self.runs: dict[str, _Run] = {}
        self.log: list[str] = []
        self._events: list[Event] = []
        self.closed = False

    def submit(self, request: EngineRequest) -> None:
        self.log.append(f"submit {request.id}")
        if len(self.runs) >= self.limit:
            self._events.append(
                Failed(
                    id=request.id,
                    message="full",
                    code="queue_full",
                    status=429,
                    type="rate_limit_error",
                    retry_after=3.0,
                )
            )
            return
        self.runs[request.id] = _Run(request)

    def push(self, push: Push) -> None:
        self.log.append(f"push {push.id} {push.stream}")
        if push.id in self.runs:
            self.runs[push.id].pushed.append(push)

    def cancel(self, cancel: Cancel) -> None:
        self.log.append(f"cancel {cancel.id} {cancel.reason}")
        if self.runs.pop(cancel.id, None) is not None:
            self._events.append(Done(id=cancel.id, reason=cancel.reason))

    def ack(self, request: str, stream: str, items: int) -> None:
        if request in self.runs:
            self.runs[request].acked += items

    def step(self) -> bool:
        ran = [self._advance(run) for run in list(self.runs.values())]
        return any(ran)

    def _advance(self, run: _Run) -> bool:
        request, params = run.request, run.request.params
        if params.get("exit"):
            os._exit(7)
        if params.get("raise"):
            raise RuntimeError("the step failed")
        if "hang" in params:
            time.sleep(params["hang"])
        if params.get("object"):
            self._emit(run, np.array([object()]))
            return True
        if "echo" in request.inputs:
            self._emit(run, request.inputs["echo"])
            self._finish(run)
            return True
        if request.client_streams:
            return self._answer_pushes(run)
        if run.sent == params.get("count", 0):
            self._finish(run)
            return True
        if run.sent - run.acked >= self.window:
            return False
        self._emit(run, [run.sent])
        return True

    def _answer_pushes(self, run: _Run) -> bool:
        pushed, run.pushed = run.pushed, []
        for push in pushed:
            if push.data is not None:
                self._emit(run, push.data)
            if push.end:
                self._finish(run)
        return bool(pushed)

    def _emit(self, run: _Run, data: Any) -> None:
        self._events.append(Emit(id=run.request.id, stream="out", seq=run.sent, data=data))
        run.sent += 1

    def _finish(self, run: _Run) -> None:
        del self.runs[run.request.id]
        usage = Usage(input={"tokens": run.request.params.get("prompt", 0)}, output={"tokens": run.sent})
        self._events.append(Done(id=run.request.id, reason="stop", usage=usage))

    def next_deadline(self) -> float | None:
        return None

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def status(self) -> dict[str, Any]:
        sent = {name: run.sent for name, run in self.runs.items()}
        facts = {"pid": os.getpid(), "frozen": gc.get_freeze_count()}
        return {"running": sorted(self.runs), "sent": sent, "log": self.log, **facts}

    def close(self) -> None:
        self.closed = True
