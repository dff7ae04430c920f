"""Graphs without a GPU: a recording is repeated by calling the function again with the objects of its first run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from mstar.engine.graphs import GraphRunner, Recorder
from mstar.nn.node import Sampled
from mstar.resources.attention.base import KVBatch, KVPlan
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.torch_sdpa import TorchAttention, _TorchKVPlan
from mstar.resources.paged_kv import PagedKV
from mstar.resources.sampler import SamplerView
from mstar.resources.staging import Stage
from mstar.testing.drive import Driver

__all__ = ["Rerun", "record_steps"]


class Rerun(Recorder):
    """As a CUDA graph would: the same tensors, views and step are read again, and the same outputs are filled."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        outputs: Mapping[str, Any] = function()
        fresh = [True]

        def replay() -> None:
            self.replays += 1
            if fresh.pop() if fresh else False:
                return  # the recording itself computed this
            for port, value in function().items():
                _tensor(outputs[port]).copy_(_tensor(value))

        return outputs, replay


class _CalledAgain(SamplerView):
    """A repetition calls the node again, so the view counts its uses anew."""

    def fill(self, *args: Any, replay: bool, **kwargs: Any) -> None:
        super().fill(*args, replay=False, **kwargs)


def _tensor(value: Any) -> Tensor:
    return value.ids if isinstance(value, Sampled) else value


class Refillable(TorchAttention):
    """The torch backend with plans that stay on a lane."""

    capturable = True

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        plan: _TorchKVPlan = stage.keep(f"{key}.plan", lambda: _TorchKVPlan(self, memory, batch))
        plan.batch = batch
        plan._layouts.clear()
        return plan


def record_steps(monkeypatch: pytest.MonkeyPatch, driver: Driver, rows: int) -> tuple[GraphRunner, Rerun]:
    """From now on *driver*'s steps run in recordings where they can."""
    worker = driver.worker
    monkeypatch.setattr("mstar.resources.sampler.SamplerView", _CalledAgain)
    for resource in worker.resources.values():
        if isinstance(resource, PagedKV):
            resource.backend, resource.capturable = Refillable(), True
    recorder = Rerun()
    runner = GraphRunner(worker.config.deployment.engine, recorder, "cpu", worth=1)
    worker.engine.runner = runner
    worker.engine.prepare(worker.plan, rows, lambda done, total: None)
    return runner, recorder
