"""What the host does in one decode step of Whisper, and how often it waits for the device.

    python benchmarks/asr_host.py --out FILE.json                                    # here, without a GPU
    python benchmarks/asr_host.py --device cuda --shape large-v3-turbo --out FILE.json

Without a GPU the steps of a tiny model run in recordings whose repetitions do nothing: what is left is the host's work,
but for what only a GPU has (CUDA's calls, FlashInfer's plans). With one, the steps are the real ones and are divided
among their parts as ``decode_gpu.py`` does it; what waits for the device is told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from asr_gpu import SHAPES, Ours, Shape, publish
from common import environment, table
from gpu.host import watching
from gpu.report import write

from mstar.engine.graphs import GraphRunner, Recorder
from mstar.resources.attention.base import KVBatch, KVPlan
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.staging import Stage

STEPS, TOKENS = 100, 300


class Still(Recorder):
    """What it has recorded stays as it is."""

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return function(), lambda: None


class Kept(TorchAttention):
    """Attention whose plan stays on a lane: nobody runs it again."""

    capturable = True

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        found: KVPlan = stage.keep(f"{key}.plan", lambda: super(Kept, self).plan_kv(memory, batch, stage, key))
        return found


def still(ours: Ours, rows: int) -> None:
    """Record the steps of *ours*, which is on the CPU."""
    worker: Any = ours.loop.worker
    for name in ("kv", "cross"):
        resource = worker.resources[name]
        resource.backend, resource.capturable = Kept(), True
    worker.engine.runner = GraphRunner(worker.config.deployment.engine, Still(), "cpu")
    worker.engine.prepare(worker.plan, rows, 1, lambda done, total: None)


def decode(ours: Ours, rows: int) -> None:
    """Bring *rows* clips to where all of them are written."""
    names = [ours._ask(sound) for sound in ours.sounds[:rows]]
    ours.loop.until(lambda: all(len(ours.loop.tokens[name]) > 3 for name in names))


def window(ours: Ours, rows: int) -> dict[str, float]:
    decode(ours, rows)
    # Without a GPU nothing is waited for, and the processor's time says the same on a busy machine.
    clock = time.thread_time if ours.loop.worker.engine.device.type == "cpu" else time.perf_counter
    spent = []
    for _ in range(STEPS):
        began = clock()
        ours.loop.step()
        spent.append(clock() - began)
    ours.loop.cancel_all()
    return {"rows": rows, "step_us": 1e6 * statistics.median(spent), "least_us": 1e6 * min(spent)}


def parts(ours: Ours, rows: int) -> dict[str, Any]:
    """The same with a stopwatch on."""
    decode(ours, rows)
    with watching(ours.loop) as watch:  # type: ignore[arg-type]
        ours.loop.step()
        watch.reset()
        began = time.perf_counter()
        for _ in range(STEPS):
            ours.loop.step()
        total = time.perf_counter() - began
    ours.loop.cancel_all()
    found = {label: 1e6 * s / STEPS for label, s in sorted(watch.seconds.items(), key=lambda item: -item[1])}
    waiting = found.pop("wait", 0.0)
    calls = {label: count / STEPS for label, count in watch.calls.items()}
    return {"host_us": 1e6 * total / STEPS - waiting, "wait_us": waiting, "parts_us": found, "calls": calls}


def measure(shape: Shape, device: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        publish(shape, Path(scratch), device, dtype)
        for rows in counts:
            options = {"engine": {"lookahead": True}}
            one = replace(shape, clips=(rows,), tokens=TOKENS)
            ours = Ours(one, Path(scratch), device, str(dtype).removeprefix("torch."), options)
            if device == "cpu":
                still(ours, rows)
            else:
                window(ours, rows)
            found.append(window(ours, rows) | (parts(ours, rows) if device != "cpu" else {}))
            ours.loop.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", help="of " + ", ".join(SHAPES))
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(("torch", "flashinfer-python"))}
    with contextlib.suppress(KeyboardInterrupt):
        result["rows"] = measure(SHAPES[words.shape], words.device, [int(n) for n in words.rows.split(",")])
    write(words.out, result)
    columns = ("rows", "step_us", "least_us", *(("host_us", "wait_us") if words.device != "cpu" else ()))
    table(f"{words.shape}, {words.device}", result["rows"], columns)


if __name__ == "__main__":
    main()
