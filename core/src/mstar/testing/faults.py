"""Makes a worker's steps fail for chosen requests, in the middle of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mstar.engine.base import Runner
from mstar.engine.step import RowResult, Work
from mstar.nn.node import Node, Step
from mstar.testing.drive import Driver


class Boom(RuntimeError):
    pass


class FaultyRunner(Runner):
    """Computes the step, and then loses it if a doomed request is in it."""

    def __init__(self, inner: Runner):
        self.inner, self.armed = inner, False

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = self.inner.run(node, entry, step, inputs)
        if self.armed:
            raise Boom("this step was doomed")
        return outputs


def doom(driver: Driver, doomed: set[str]) -> None:
    """From now on every step with a request in *doomed* (which may grow later) fails."""
    engine = driver.worker.engine
    runner = engine.runner = FaultyRunner(engine.runner)
    plain = engine._step

    def step(work: Sequence[Work]) -> list[RowResult]:
        runner.armed = any(w.call.run.request.id in doomed for w in work)
        return plain(work)

    engine._step = step  # type: ignore[method-assign]
