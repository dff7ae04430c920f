"""A worker of one shape in this process, driven step by step, as an executor's loop drives it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.child import Job
from gpu.deploy import deployment
from gpu.shapes import SHAPES, sizes_of
from mstar.cluster.base import Phase, WorkerConfig
from mstar.collector import settle as settle_collector
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.request import Cancel, Emit, EngineRequest, Failed, SamplingParams
from mstar.worker.core import Worker
from mstar.worker.layout import Meshes

__all__ = ["GREEDY", "SAMPLED", "Engine", "EngineError", "Loop", "Window", "bench_registry", "engine_of"]

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.9}
STALLED_S = 60.0
"""Seconds without a token after which a wait is given up."""


class EngineError(Exception):
    """The engine refused or failed a request, or made no progress."""


@dataclass(frozen=True)
class Window:
    """Steps in steady decode. *times*: of each return with tokens, after :attr:`began`; *tokens*: what came then."""

    began: float
    times: Sequence[float]
    tokens: Sequence[int]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.began

    def step_times(self, rows: int) -> list[float]:
        """Seconds per step of *rows* tokens; a return with more or fewer tokens counts for as many steps."""
        edges = [self.began, *self.times]
        spans = [after - before for before, after in itertools.pairwise(edges)]
        return [span * rows / tokens for span, tokens in zip(spans, self.tokens, strict=True)]


def bench_registry() -> Registry:
    """The core and the shapes; no installed plugin."""
    return Registry(load_plugins(Settings(plugins=(), extra_plugins=("gpu.plugin",))))


def engine_of(job: Job, state: dict[str, Any]) -> Engine:
    """The process's engine, loaded when it is first asked for."""
    if "engine" not in state:
        sizes = sizes_of(job.shape)
        options = deployment(sizes, job.device, job.deployment)
        state["engine"] = Engine(job.shape, job.weights, options)
    engine: Engine = state["engine"]
    return engine


class Loop:
    """A worker in this process, driven as an executor's loop drives it, and what its requests have said."""

    def __init__(
        self, registry: Registry, key: str, weights: Path, options: Mapping[str, Any], meshes: Meshes | None = None
    ):
        spec = registry.model(key)
        merged = merge_deployment(spec.key, packaged_deployment(spec), dict(options))
        self.phases: dict[str, float] = {}
        began = time.perf_counter()

        def note(phase: Phase) -> None:
            self.phases[phase.name] = time.perf_counter() - began

        config = WorkerConfig(key=key, weights=str(weights), deployment=merged)
        self.worker = Worker(config, registry, note, meshes)
        settle_collector()
        self.load_s = time.perf_counter() - began
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self._numbers = itertools.count()

    def name(self) -> str:
        """A name for the next request."""
        return f"request {next(self._numbers)}"

    def ask(self, request: EngineRequest) -> str:
        self.tokens[request.id] = []
        self.worker.submit(request)
        return request.id

    def cancel_all(self) -> None:
        """End what runs, and step until nothing is left."""
        for name in self.tokens.keys() - self.ended:
            self.worker.cancel(Cancel(id=name))
        self.take()
        self.until(lambda: self.ended.issuperset(self.tokens))
        while self.worker.step():
            self.take()
        self.take()
        self.tokens.clear()
        self.ended.clear()

    # --- steps --------------------------------------------------------------------------------------------------------
    def step(self) -> int:
        """One turn of the loop; the number of tokens that came out of it."""
        self.worker.step()
        return self.take()

    def take(self) -> int:
        """Collect and acknowledge events, as a client that reads at once."""
        found = 0
        for event in self.worker.events():
            if isinstance(event, Emit):
                if isinstance(event.data, list):  # tokens
                    self.tokens[event.id].extend(event.data)
                    found += len(event.data)
                self.worker.ack(event.id, event.stream, 1)
            elif isinstance(event, Failed):
                raise EngineError(f"{event.code}: {event.message}")
            else:
                self.ended.add(event.id)
        return found

    def until(self, reached: Callable[[], bool]) -> None:
        last = time.monotonic()
        while not reached():
            if self.step():
                last = time.monotonic()
            elif time.monotonic() - last > STALLED_S:
                raise EngineError(f"no token for {STALLED_S:.0f} s; the worker says {self.worker.status()}")

    def window(self, steps: int, after: Callable[[], None] = lambda: None) -> Window:
        """Run until *steps* turns have brought tokens. *after* is called after each of them."""
        times: list[float] = []
        tokens: list[int] = []
        began = last = time.perf_counter()
        while len(times) < steps:
            found = self.step()
            now = time.perf_counter()
            if found:
                times.append(now)
                tokens.append(found)
                last = now
                after()
            elif now - last > STALLED_S:
                raise EngineError(f"no token for {STALLED_S:.0f} s; the worker says {self.worker.status()}")
        return Window(began, times, tokens)

    def run_to_end(self, names: Sequence[str]) -> None:
        self.until(lambda: self.ended.issuperset(names))

    def close(self) -> None:
        """Free the device's memory."""
        self.worker.close()
        self.worker.events()
        del self.worker
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Engine(Loop):
    """A language model of one shape. Requests have random prompts of exact length and never stop at the end token."""

    def __init__(
        self, shape: str, weights: Path, options: Mapping[str, Any], seed: int = 0, meshes: Meshes | None = None
    ):
        super().__init__(bench_registry(), shape, weights, options, meshes)
        self.vocab = SHAPES[shape].facts.vocab
        self._draw = np.random.default_rng(seed)

    def prompt(self, length: int) -> np.ndarray:
        return self._draw.integers(0, self.vocab, length, dtype=np.int64)

    def submit(self, prompt: np.ndarray, max_tokens: int, **sampling: Any) -> str:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7, **sampling)
        return self.ask(EngineRequest(id=self.name(), inputs={"prompt": prompt}, sampling={"sampler": params}))

    def begin_decode(self, batch: int, prompt: int, max_tokens: int, warm: int, **sampling: Any) -> list[str]:
        """*batch* new requests, brought to where all of them decode and *warm* steps beyond."""
        names = [self.submit(self.prompt(prompt), max_tokens, **sampling) for _ in range(batch)]
        self.until(lambda: all(self.tokens[name] for name in names))
        self.window(warm)
        return names
