"""The engine's parts: how it is set up for each, pictures a second, and its timeline."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.timeline import digest as kernels
from gpu.timeline import profile_run

import mstar
from image.timeline import Asked, digest, read_trace
from mstar.nn import ops
from mstar.settings import Settings

__all__ = [
    "ENGINES",
    "MINUTES",
    "PROMPT",
    "deployment",
    "engine",
    "memory",
    "rates",
    "settings_of",
    "timeline",
    "without_kernels",
]

ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {"engine": {"compile": False}},
    "flashinfer": {"engine": {"compile": False}, "model_kwargs": {"attention_backend": "flashinfer"}},
    "plain": {"engine": {"runner": "eager", "compile": False}},
    "eager": {"engine": {"runner": "eager", "compile": False}},
    "compiled": {"engine": {"compile": True}},
    "exact": {
        "engine": {"compile": True, "compile_rounding": True},
        "model_kwargs": {"compile_exact_ops": ["norms"]},
    },
}
PLUGINS = ("image.random_weights", "mstar_diffusion.plugin")
MINUTES = ("compiled", "exact")
"""Parts that compile for each number of requests: one at a time is measured."""
MOST_ROWS = 8
"""Of a denoise step."""
PROMPT = "A lighthouse on a cliff at dawn, gulls around it, long exposure, the sea a mist below"


def without_kernels() -> None:
    """From now on PyTorch's own operations only, in this process."""
    ops.cuda_kernels_fault = lambda: "they are what is compared with"  # type: ignore[assignment]


def deployment(shape: Any, part: str, device: str, at_once: Sequence[int]) -> dict[str, Any]:
    """Fields of the deployment file for *part*, a key of :data:`ENGINES`, with the steps captured that it needs."""
    fields: dict[str, Any] = json.loads(json.dumps(ENGINES[part]))
    options = fields.setdefault("model_kwargs", {})
    options["capture_sizes"] = [[shape.size, shape.size]]
    options["capture_batch_sizes"] = sorted({min(count, MOST_ROWS) for count in (1, *at_once)})
    if shape.flux2:
        options["capture_edit_sizes"] = []
    if device == "cpu":  # no machine code, and no graphs: that the parts run is all that is asked there
        fields["engine"] = {}
    return {**fields, "max_concurrent_requests": 16}


def settings_of() -> Settings:
    """The process's settings, with the plugins of these benchmarks alone: the same whether they are installed or only
    on the path."""
    return replace(Settings.from_env(os.environ), plugins=(), extra_plugins=PLUGINS)


def engine(
    shape: Any, folder: Path, part: str, at_once: Sequence[int], args: argparse.Namespace, pictures: Path
) -> dict[str, Any]:
    """Start, latency and pictures a second of *part*. Four of its pictures go to the file *pictures*."""
    began = time.perf_counter()
    settings = settings_of()
    options = deployment(shape, part, args.device, at_once)
    with mstar.load(shape.key, weights=str(folder), device=args.device, settings=settings, **options) as model:
        start_s = time.perf_counter() - began
        knobs = {"width": shape.size, "height": shape.size, "num_inference_steps": shape.steps}

        async def some(count: int, first: int = 0) -> list[Any]:
            asked = (model.agenerate(PROMPT, seed=first + index, **knobs) for index in range(count))
            return list(await asyncio.gather(*asked))

        # what is compiled or captured at the first requests is not what is measured
        for count in at_once:
            asyncio.run(some(count))
        found = {"start_s": start_s, **rates(lambda count: asyncio.run(some(count)), at_once, args.rounds)}
        answers = [answer for seed in range(4) for answer in asyncio.run(some(1, seed))]
        np.save(pictures, np.stack([answer.outputs["image"][0].frames[0] for answer in answers]))
    return found | memory(args.device)


def timeline(shape: Any, folder: Path, args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    """:func:`image.timeline.digest` of the request whose time is the median, and the kernels of one."""
    options = deployment(shape, "graphs", args.device, [1])
    options["engine"]["trace"] = str(trace)
    knobs = {"width": shape.size, "height": shape.size, "num_inference_steps": shape.steps}
    prepared: list[float] = []
    with mstar.load(shape.key, weights=str(folder), device=args.device, settings=settings_of(), **options) as model:
        processor = model._service.processor
        plain = processor.prepare

        def prepare(*given: Any) -> Any:
            began = time.monotonic()
            try:
                return plain(*given)
            finally:
                prepared.append(time.monotonic() - began)

        processor.prepare = prepare  # type: ignore[method-assign]

        def ask(seed: int) -> Asked:
            began = time.monotonic()
            model.generate(PROMPT, seed=seed, **knobs)
            return Asked(began, time.monotonic(), prepared[-1])

        for seed in range(2):
            ask(seed)
        rounds = [ask(seed) for seed in range(max(args.rounds, 3))]
        found: dict[str, Any] = {}
        if args.device == "cuda":
            found["kernels"] = kernels(profile_run(lambda: ask(0)), 1)
        found["engine"] = dict(model.status()["engine"])
    events = read_trace(trace)
    digests = sorted((digest(events, asked) for asked in rounds), key=lambda d: float(d["total"]))
    return {**digests[len(digests) // 2], "totals": [d["total"] for d in digests], **found}


def rates(run: Callable[[int], Any], at_once: Sequence[int], rounds: int) -> dict[str, Any]:
    """Median seconds of one request, and pictures a second at each number of requests at once."""
    found: dict[str, Any] = {}
    for count in at_once:
        times = []
        for _ in range(rounds if count == 1 else max(3, rounds // 2)):
            began = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - began)
        median = statistics.median(times)
        found[f"pictures_per_s_{count}"] = count / median
        if count == 1:
            found["latency_s"] = median
    return found


def memory(device: str) -> dict[str, float]:
    """The most that this process has held of a GPU's memory so far."""
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}
