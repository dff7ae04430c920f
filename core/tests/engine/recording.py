"""Graphs without a GPU: a recording is repeated by calling the function again with the objects of its first run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from mstar.engine.graphs import GraphRunner, Recorder
from mstar.nn.node import Node, Sampled, Step
from mstar.resources.attention.base import KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.torch_sdpa import TorchAttention, _TorchKVPlan, _TorchRaggedPlan
from mstar.resources.sampler_view import SamplerView
from mstar.resources.staging import Stage
from mstar.spec.deployment import EngineOptions
from mstar.testing.drive import Driver

__all__ = ["Rerun", "SmallRunner", "record_steps"]


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

    capturable = capturable_chunks = capturable_beside = True

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        plan: _TorchKVPlan = stage.keep(f"{key}.plan", lambda: _TorchKVPlan(self, memory, batch))
        plan.batch = batch
        plan._layouts.clear()
        return plan

    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        plan: _TorchRaggedPlan = stage.keep(f"{key}.plan", lambda: _TorchRaggedPlan(lengths))
        plan.__init__(lengths)  # type: ignore[misc]
        return plan


class SmallRunner(GraphRunner):
    """Records at the first use, for buckets of tokens that are as small as the miniatures' prompts.

    :ivar lanes: rows and tokens, without padding, of all steps that ran in recordings whose rows have several tokens.
    """

    def __init__(self, options: EngineOptions, recorder: Recorder):
        super().__init__(options, recorder, "cpu", worth=1)
        self.lanes: list[tuple[int, int]] = []

    def sizes(self, rows: int, tokens: int) -> Sequence[tuple[int, int]]:
        sizes = super().sizes(rows, tokens)
        self._chunk_rows = [3, 6, rows + 1]
        self._chunk_tokens = [8, 20, 32, 64, 100]
        return [size for size in sizes if size[0] == size[1]] + [(3, 20), (3, 8)]

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = super().run(node, entry, step, inputs)
        if step.lane is not None and not step.lane.trial and step.lane.tokens > step.lane.rows:
            self.lanes.append(step.lane.real)
        return outputs


def record_steps(monkeypatch: pytest.MonkeyPatch, driver: Driver, rows: int) -> tuple[SmallRunner, Rerun]:
    """From now on *driver*'s steps run in recordings where they can."""
    worker = driver.worker
    monkeypatch.setattr("mstar.resources.sampler.SamplerView", _CalledAgain)
    for resource in worker.resources.values():
        if hasattr(resource, "backend"):
            resource.backend, resource.capturable, resource.capturable_chunks = Refillable(), True, True  # type: ignore[attr-defined]
    recorder = Rerun()
    runner = SmallRunner(worker.config.deployment.engine, recorder)
    worker.engine.runner = runner
    tokens = worker.config.deployment.scheduler.step_tokens("cpu")
    worker.engine.prepare(worker.plan, rows, tokens, lambda done, total: None)
    return runner, recorder
