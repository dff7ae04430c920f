"""Makes a worker's steps fail for chosen requests, in the middle of the forward pass; finds moments to interrupt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from mstar.engine.base import Runner
from mstar.engine.engine import Flight
from mstar.engine.step import Work
from mstar.nn.node import Node, Step
from mstar.testing.drive import Driver

__all__ = ["Boom", "FaultyRunner", "doom", "watch_cuts"]


class Boom(RuntimeError):
    """A fault that was put in on purpose."""


class _FaultAt(TorchFunctionMode):
    """Raises in the *at*-th call of a torch function (from 1)."""

    def __init__(self, at: int):
        super().__init__()
        self.left, self.raised = at, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise Boom("this step was doomed")
        return func(*args, **(kwargs or {}))


class FaultyRunner(Runner):
    """Loses the steps of doomed requests.

    :param at: the torch call inside the node in which to raise; ``None`` (or a step of fewer calls): after the node.
    :ivar swallowed: nodes that caught the fault and went on, as ``"Class.entry"``.
    """

    def __init__(self, inner: Runner, at: int | None = None):
        self.inner, self.at, self.armed = inner, at, False
        self.swallowed: set[str] = set()

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.armed:
            return self.inner.run(node, entry, step, inputs)
        with _FaultAt(self.at or 0) as fault:
            outputs = self.inner.run(node, entry, step, inputs)
        if fault.raised:
            self.swallowed.add(f"{type(node).__name__}.{entry}")
            return outputs
        raise Boom("this step was doomed")


def doom(driver: Driver, doomed: set[str], at: int | None = None) -> FaultyRunner:
    """From now on every step with a request in *doomed* (which may grow later) fails. *at*: see
    :class:`FaultyRunner`."""
    engine = driver.worker.engine
    runner = FaultyRunner(engine.runner, at)
    engine.runner = runner
    plain = engine._launch

    def launch(work: Sequence[Work]) -> Flight:
        runner.armed = any(w.call.run.request.id in doomed for w in work)
        return plain(work)

    engine._launch = launch  # type: ignore[method-assign]
    return runner


def watch_cuts(driver: Driver) -> set[str]:
    """The requests that have a call of which only some chunks are computed; kept up to date."""
    engine, cut = driver.worker.engine, set[str]()
    plain = engine._launch

    def launch(work: Sequence[Work]) -> Flight:
        flight = plain(work)
        for w in work:
            (cut.discard if w.complete else cut.add)(w.call.run.request.id)
        return flight

    engine._launch = launch  # type: ignore[method-assign]
    return cut
