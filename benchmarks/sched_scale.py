"""What scheduling costs per step, against the length of the queue and the number of active rows (promise P9).

One cycle is what a worker asks of the scheduler around every step in steady decode: ``start`` (the head of the queue is
refused, since the pools are full), ``next``, and ``ready`` for every row of the batch. A second workload has a deadline
on every row, a third cuts a long prompt into chunks beside the decodes. No torch, no model: pure overhead.
It is CPU time of the thread, so that other programs on the machine do not count.

    python benchmarks/sched_scale.py            # writes benchmarks/results/sched_scale.json
    python benchmarks/sched_scale.py --quick    # a few seconds, prints only
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

from common import environment, percentiles, table, write_result

from mstar.scheduler.base import Item, Ticket
from mstar.scheduler.default import DefaultScheduler
from mstar.spec.deployment import SchedulerOptions

QUEUES = (10, 100, 1_000, 10_000)
ROWS = (1, 8, 32, 64, 128, 256)
GROUP = ("lm", "forward", ())
STEP_SECONDS = 0.02
"""Length of a step on the scheduler's clock, which the benchmark advances itself."""


def decode(scheduler: DefaultScheduler, rows: int) -> None:
    for row in range(rows):
        scheduler.ready(Item(f"run {row}", GROUP, decode=True))


def deadlines(scheduler: DefaultScheduler, rows: int) -> None:
    for row in range(rows):
        scheduler.ready(Item(f"run {row}", GROUP, decode=True, deadline=row * 1e-3))


def chunked_prefill(scheduler: DefaultScheduler, rows: int) -> None:
    decode(scheduler, rows - 1)
    scheduler.ready(Item("long prompt", GROUP, tokens=10**9, chunkable=True))


WORKLOADS: dict[str, Callable[[DefaultScheduler, int], None]] = {
    "decode": decode,
    "deadlines": deadlines,
    "chunked prefill": chunked_prefill,
}


def prepare(workload: str, queue: int, rows: int) -> DefaultScheduler:
    """A scheduler with *queue* requests of 100 tenants waiting and *rows* rows running."""
    scheduler = DefaultScheduler(SchedulerOptions(max_queue=queue, max_step_rows=max(ROWS), max_step_tokens=512))
    for n in range(queue):
        scheduler.submit(Ticket(f"waits {n}", tenant=f"tenant {n % 100}"))
    WORKLOADS[workload](scheduler, rows)
    return scheduler


def refuse(ticket: Ticket) -> bool:
    return False


def cycle(scheduler: DefaultScheduler, now: float) -> int:
    """One step's worth of scheduling; returns the rows of its batch."""
    scheduler.start(refuse)
    batch = scheduler.next(now)
    assert batch is not None
    for item, tokens in zip(batch.items, batch.tokens, strict=True):
        if tokens < item.tokens:
            item.tokens -= tokens
        scheduler.ready(item)
    return len(batch.items)


def measure(workload: str, queue: int, rows: int, cycles: int) -> dict[str, Any]:
    """Microseconds per cycle over *cycles* cycles, and per row."""
    scheduler = prepare(workload, queue, rows)
    for n in range(20):
        assert cycle(scheduler, n * STEP_SECONDS) == rows, "every active row must be in every step"
    times = []
    gc.collect()
    gc.disable()
    for n in range(20, 20 + cycles):
        begin = time.thread_time_ns()
        cycle(scheduler, n * STEP_SECONDS)
        times.append((time.thread_time_ns() - begin) / 1e3)
    gc.enable()
    found = percentiles(times)
    return {"workload": workload, "queue": queue, "rows": rows, "us": found, "us_per_row": found["p50"] / rows}


def flatness(results: list[dict[str, Any]], workload: str, rows: int) -> dict[str, Any]:
    """How much the longest queue costs over the shortest; 1 is flat."""
    costs = {r["queue"]: r["us"]["p50"] for r in results if r["workload"] == workload and r["rows"] == rows}
    return {"workload": workload, "rows": rows, "ratio": costs[QUEUES[-1]] / costs[QUEUES[0]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=2000, help="cycles measured at each point (default: 2000)")
    parser.add_argument("--quick", action="store_true", help="100 cycles at each point, write nothing")
    options = parser.parse_args()
    cycles = 100 if options.quick else options.cycles
    facts = environment(packages=())
    results = [measure(w, queue, rows, cycles) for w in WORKLOADS for rows in ROWS for queue in QUEUES]
    for workload in WORKLOADS:
        rows = [{**r, **r["us"]} for r in results if r["workload"] == workload]
        columns = ["rows", "queue", "p50", "p95", "us_per_row"]
        table(f"{workload}: µs per start + next + ready cycle", rows, columns)
    flat = [flatness(results, workload, rows) for workload in WORKLOADS for rows in ROWS]
    table(f"p50 with {QUEUES[-1]:,} waiting over p50 with {QUEUES[0]}", flat, ["workload", "rows", "ratio"])
    if not options.quick:
        write_result("sched_scale", results, {"cycles": cycles, "tenants": 100}, facts)


if __name__ == "__main__":
    main()
