"""Decode and whole loads through the engine in this process."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu.child import Job
from gpu.engine import GREEDY, SAMPLED, Engine, engine_of
from gpu.shapes import SHAPES, sizes_of
from gpu.timeline import profile_steps

__all__ = ["decode", "load", "timeline"]

MODES = {"greedy": GREEDY, "sampled": SAMPLED}


def decode(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """Step times by batch, greedy and sampled."""
    engine, sizes = engine_of(job, state), sizes_of(job.shape)
    rows = []
    for batch in job.batches or sizes.batches:
        for mode, sampling in MODES.items():
            row = {"batch": batch, "mode": mode, **_measure(job, engine, batch, sampling)}
            rows.append(row)
            print(
                f"  {batch:3} {mode:7}: {row['step_s'] * 1e3:7.3f} ms, {row['tokens_per_s']:9.0f} tokens/s", flush=True
            )
    return {"load_s": engine.load_s, "phases": engine.phases, "rows": rows}


def _measure(job: Job, engine: Engine, batch: int, sampling: dict[str, float]) -> dict[str, Any]:
    sizes = sizes_of(job.shape)
    names = engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **sampling)
    before = sum(len(engine.tokens[name]) for name in names)
    window = engine.window(sizes.steps)
    after = sum(len(engine.tokens[name]) for name in names)
    context = sizes.prompt + (before + after) / 2 / batch
    times = window.step_times(batch)
    tokens = sum(window.tokens)
    engine.cancel_all()
    return {
        "step_s": statistics.median(times),
        "step_p95_s": sorted(times)[int(0.95 * (len(times) - 1))],
        "mean_step_s": window.seconds * batch / tokens,
        "tokens_per_s": tokens / window.seconds,
        "steps": len(times),
        "context": context,
        "kv_read_bytes": batch * context * SHAPES[job.shape].kv_bytes,
    }


def timeline(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """What the device does in such steps: greedy at each batch, and sampled at one.

    A part of its own, after all that is timed: a profiler that has once run may leave its traces in later times.
    """
    engine, sizes = engine_of(job, state), sizes_of(job.shape)
    batches = job.batches or sizes.batches
    rows = []
    for batch, mode in [*((batch, "greedy") for batch in batches), (sizes.host_batch, "sampled")]:
        engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **MODES[mode])
        found = profile_steps(engine.window, sizes.warm // 2, sizes.profiled)
        engine.cancel_all()
        rows.append({"batch": batch, "mode": mode, **found})
    return {"rows": rows}


def load(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """All generated tokens over the time from the first prompt to the last token, of requests that come at once.

    This is what a closed run over HTTP with as many streams can reach at most, and what a peer's batch is compared
    with.
    """
    engine, sizes = engine_of(job, state), sizes_of(job.shape)
    rows = []
    for streams, answer in sizes.loads:
        for timed in (False, True):  # the first run brings what is made when a shape is first seen
            began = time.perf_counter()
            names = [engine.submit(engine.prompt(sizes.prompt), answer, **GREEDY) for _ in range(streams)]
            first: list[float] = []

            def seen(names: list[str] = names, first: list[float] = first) -> bool:
                if not first and all(engine.tokens[name] for name in names):
                    first.append(time.perf_counter())
                return engine.ended.issuperset(names)

            engine.until(seen)
            seconds = time.perf_counter() - began
            tokens = sum(len(engine.tokens[name]) for name in names)
            engine.cancel_all()
            if timed:
                rows.append(
                    {
                        "streams": streams,
                        "prompt": sizes.prompt,
                        "new_tokens": answer,
                        "tokens": tokens,
                        "seconds": seconds,
                        "tokens_per_s": tokens / seconds,
                        "prompts_s": first[0] - began if first else None,
                    }
                )
    return {"rows": rows}
