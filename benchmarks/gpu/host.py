"""What the host does in a decode step, taken apart by timing the calls between its parts.

Each part's time is its own: what it calls that is timed as well counts there only. ``wait`` is the time in calls that
wait for the device. Timing costs something too, so the step without it is measured beside.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu.child import Job
from gpu.engine import GREEDY, Engine, engine_of
from gpu.shapes import sizes_of

__all__ = ["Stopwatch", "host"]


class Stopwatch:
    """Exclusive times by label of the calls that it has wrapped. Calls from threads not its own are not timed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.missing: list[str] = []
        self._inner: list[float] = []
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Time ``owner.name``, an attribute of an object, a class or a module; a missing one is noted."""
        original = getattr(owner, name, None)
        if original is None:
            self.missing.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
            return
        own = name in vars(owner)
        inner, seconds, calls, clock = self._inner, self.seconds, self.calls, time.perf_counter
        mine, thread = self._thread, threading.get_ident

        def timed(*args: Any, **kwargs: Any) -> Any:
            if thread() != mine:
                return original(*args, **kwargs)
            inner.append(0.0)
            began = clock()
            try:
                return original(*args, **kwargs)
            finally:
                spent = clock() - began
                seconds[label] += spent - inner.pop()
                calls[label] += 1
                if inner:
                    inner[-1] += spent

        try:
            setattr(owner, name, timed)
        except AttributeError:  # an object with slots
            self.missing.append(f"{type(owner).__name__}.{name}")
            return
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def reset(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


WAITS = (
    (torch.Tensor, ("tolist", "item", "cpu", "numpy", "__int__", "__bool__")),
    (torch.cuda.Event, ("synchronize", "query")),
    (torch.cuda.Stream, ("synchronize",)),
    (torch.cuda, ("synchronize",)),
)


@contextmanager
def watching(engine: Engine) -> Iterator[Stopwatch]:
    """A stopwatch on the parts of *engine*'s steps."""
    watch, worker = Stopwatch(), engine.worker
    try:
        for name in ("start", "next", "ready"):
            watch.wrap(worker.scheduler, name, "schedule")
        for name, resource in worker.resources.items():
            watch.wrap(resource, "plan", f"plan {name}")
            watch.wrap(resource, "commit", "commit")
        step = importlib.import_module("mstar.engine.engine")
        watch.wrap(step, "make_step", "gather")
        watch.wrap(step, "gather", "gather")
        watch.wrap(step, "split", "land")
        watch.wrap(worker.engine.runner, "run", "run")
        watch.wrap(worker.engine, "launch", "launch, the rest")
        watch.wrap(worker.engine, "land", "land")
        watch.wrap(importlib.import_module("mstar.graph.foresight").Foresight, "foresee", "foresee")
        watch.wrap(importlib.import_module("mstar.graph.run").RequestRun, "complete", "route")
        watch.wrap(worker, "events", "events")
        watch.wrap(worker, "ack", "events")
        watch.wrap(worker, "step", "worker, the rest")
        for owner, names in WAITS:
            for name in names:
                watch.wrap(owner, name, "wait")
        yield watch
    finally:
        watch.undo()


def host(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """µs per step and part, at one batch."""
    engine, sizes = engine_of(job, state), sizes_of(job.shape)
    batch = sizes.host_batch
    engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **GREEDY)
    plain = engine.window(sizes.steps)
    with watching(engine) as watch:
        engine.window(2)
        watch.reset()
        timed = engine.window(sizes.steps)
    engine.cancel_all()
    steps = sum(timed.tokens) / batch
    parts = {label: 1e6 * spent / steps for label, spent in sorted(watch.seconds.items(), key=lambda item: -item[1])}
    total = 1e6 * timed.seconds / steps
    waiting = parts.pop("wait", 0.0)
    return {
        "batch": batch,
        "step_us": 1e6 * statistics.median(plain.step_times(batch)),
        "timed_step_us": total,
        "wait_us": waiting,
        "host_us": total - waiting,
        "parts_us": parts,
        "outside_us": total - waiting - sum(parts.values()),
        "calls_per_step": {label: count / steps for label, count in watch.calls.items()},
        "not_found": watch.missing,
    }
