"""One prompt alone: time to its first token inside the engine, and how near its arithmetic comes to the device's."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu.child import Job
from gpu.engine import GREEDY, Engine, engine_of
from gpu.shapes import SHAPES, sizes_of

__all__ = ["prefill"]


def prefill(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    engine, sizes, shape = engine_of(job, state), sizes_of(job.shape), SHAPES[job.shape]
    rows = []
    for tokens in sizes.prefills:
        _first_token(engine, tokens)
        found = [_first_token(engine, tokens) for _ in range(sizes.repeats)]
        seconds = statistics.median(spent for spent, _ in found)
        flops = shape.prefill_flops(tokens)
        rows.append(
            {
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "flops": flops,
                "flops_per_s": flops / seconds,
                "steps": found[-1][1],
            }
        )
    return {"rows": rows}


def _first_token(engine: Engine, tokens: int) -> tuple[float, int]:
    """Seconds and steps from the request to its first token."""
    prompt = engine.prompt(tokens)
    steps = engine.worker.engine.steps
    began = time.perf_counter()
    name = engine.submit(prompt, 1, **GREEDY)
    engine.until(lambda: bool(engine.tokens[name]))
    seconds = time.perf_counter() - began
    steps = engine.worker.engine.steps - steps
    engine.run_to_end([name])
    engine.cancel_all()
    return seconds, steps
