"""A worker without a model that paints noise at once: what is left of a picture is its way."""

from __future__ import annotations

from typing import Any

import numpy as np

import mstar
from http_path.worker import PathWorker, no_registry
from mstar.cluster.base import WorkerConfig
from mstar.cluster.processes import ProcessesExecutor
from mstar.spec.request import Done, Emit, EngineRequest, Usage

__all__ = ["NoiseExecutor", "NoiseWorker", "no_registry"]

SIDE = 1024


class NoiseWorker(PathWorker):
    """Each request's picture is there a step after it came: uint8 ``[SIDE, SIDE, 3]``."""

    def __init__(self, config: WorkerConfig, registry: Any, on_phase: Any):
        super().__init__(config, registry, on_phase)
        self._picture = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)

    def submit(self, request: EngineRequest) -> None:
        usage = Usage(output={"images": 1}, run_s=1e-3)
        self._events.append(Emit(id=request.id, stream="image", seq=0, data=[self._picture]))
        self._events.append(Done(id=request.id, reason="done", usage=usage))

    def step(self) -> bool:
        return bool(self._events)


class NoiseExecutor(ProcessesExecutor):
    """The worker above, in a process of its own as any other."""

    def __init__(self, *arguments: Any):
        here = NoiseWorker.__module__
        super().__init__(*arguments, worker_factory=f"{here}:NoiseWorker", registry_factory=f"{here}:no_registry")


@mstar.hookimpl
def mstar_executors() -> dict[str, str]:
    return {"noise": f"{__name__}:NoiseExecutor"}
