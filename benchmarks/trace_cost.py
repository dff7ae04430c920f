"""What a timeline (``engine.trace``) costs a decode step, in CPU time: in the worker's thread, and in the writing one.

A worker of a miniature (a model of a few numbers: what is measured is the host's work) decodes, and its timeline is
taken away in every other step. The two kinds of step are compared by their medians. It is CPU time of the thread, so
that other programs do not count; the writer's is the process's less the worker's, with one thread for the model.

    python benchmarks/trace_cost.py            # writes benchmarks/results/trace_cost.json; two minutes
    python benchmarks/trace_cost.py --quick    # prints only
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import environment, table, write_result

from mstar.engine.trace import Trace
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example


def decoding(rows: int, steps: int, lookahead: bool, trace: Path) -> Driver:
    """A worker in the middle of *rows* answers, of which none ends within *steps*."""
    tokens = steps + 64
    driver = Driver(
        "mini_chat",
        miniature_registry(),
        max_concurrent_requests=rows,
        resources={"kv": {"tokens": rows * (tokens + 64), "max_tokens": tokens + 64}},
        engine={"lookahead": lookahead, "threads": 1, "trace": str(trace)},
    )
    for row in range(rows):
        driver.submit(f"r{row}", Example(f"Row {row}", {"max_tokens": tokens, "ignore_eos": True}))
    for _ in range(32):
        driver.worker.step()
        driver.take()
    assert not driver.ended, driver.ended
    return driver


def measure(rows: int, steps: int, lookahead: bool) -> dict[str, Any]:
    """CPU microseconds of one step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        driver = decoding(rows, steps, lookahead, file)
        worker = driver.worker
        traces = (worker.engine.trace, Trace())
        taken: tuple[list[float], list[float]] = ([], [])
        gc.collect()
        gc.disable()
        others = time.process_time() - time.thread_time()
        for step in range(steps):
            worker.engine.trace = traces[step % 2]
            began = time.thread_time()
            worker.step()
            taken[step % 2].append(time.thread_time() - began)
            driver.take()
        gc.enable()
        worker.engine.trace = traces[0]
        worker.close()
        others = time.process_time() - time.thread_time() - others
        size = file.stat().st_size
    on, off = (statistics.median(seconds) * 1e6 for seconds in taken)
    writer = others / (steps / 2) * 1e6
    return {
        "rows": rows,
        "lookahead": lookahead,
        "step_us": round(off, 1),
        "added_us": round(on - off, 1),
        "added_percent": round((on - off) / off * 100, 2),
        "writer_us": round(writer, 1),
        "bytes_a_step": round(size / (steps / 2)),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps; print only")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args(words)
    facts = environment()
    steps = 400 if arguments.quick else 4000
    found = [measure(rows, steps, lookahead) for rows in arguments.rows for lookahead in (False, True)]
    table("what a timeline costs a step", found, list(found[0]), digits=2)
    if not arguments.quick:
        write_result("trace_cost", found, {"steps": steps}, facts)


if __name__ == "__main__":
    main()
