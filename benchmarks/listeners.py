"""Listeners of Orpheus on a clock of its own: first audio and gaps, without a GPU.

    python benchmarks/listeners.py --streams 100,200 --out FILE.json
    python benchmarks/listeners.py --streams 100,200 --no-preroll      # what it was without (mstar.graph.preroll)

The real worker, its scheduler and its streams run on the CPU with nodes that compute nothing (``host_cost.py``'s), and
listeners come and ask as in ``tts_gpu.py``. Time is a device's: a step begins when the one before has ended and its
host's part is done, and takes what such a step took on an H200, given by its rows and tokens (the options; NOTES.md
says where they are from). Single steps take longer at random, with a seed. So it tells how an order of steps or a rule
of playback changes gaps, and is only as good as these costs.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import environment, table
from gpu.report import write
from host_cost import Clock, Standin, speaker_of
from speech.streams import run_streams
from tts_gpu import summary

from mstar.engine.engine import Flight
from mstar.engine.trace import Trace
from mstar.graph import preroll
from mstar.spec.deployment import SchedulerOptions

DEFAULTS = SchedulerOptions()


class Timed(Trace):
    """Moves *clock* on as a device and its host would. Each kind of step takes ``(ms, ms a row, ms a token)``."""

    def __init__(self, clock: Clock, words: argparse.Namespace):
        self.clock, self.words = clock, words
        self.random = random.Random(words.seed)
        self.free = clock.now  # when the device has done what it was given
        self.ends: dict[int, float] = {}
        self.steps: dict[str, int] = {}
        self.busy = 0.0

    def launched(self, flight: Flight, captured: bool) -> None:
        words, node, rows = self.words, str(flight.work[0].call.op.call.node), len(flight.work)
        tokens = sum(w.tokens for w in flight.work if w.tokens > 1) if node == "lm" else 0
        fixed, a_row, a_token = words.lm if node == "lm" else words.codec
        cost = fixed + a_row * rows + a_token * tokens
        cost *= 1 + self.random.expovariate(1 / words.jitter) if words.jitter else 1
        if self.random.random() < words.stalls:
            cost += words.stall_ms
        self.clock.now += (words.host_ms[0] + words.host_ms[1] * rows) / 1e3
        self.free = self.ends[id(flight)] = max(self.free, self.clock.now) + cost / 1e3
        self.busy += cost / 1e3
        self.steps[node] = self.steps.get(node, 0) + 1

    def landed(self, flight: Flight) -> None:
        self.clock.now = max(self.clock.now, self.ends.pop(id(flight)))


def simulate(scratch: Path, streams: int, words: argparse.Namespace) -> dict[str, Any]:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    with ExitStack() as stack:
        gpu = {"max_step_tokens": DEFAULTS.step_tokens("cuda"), "max_mixed_rows": DEFAULTS.mixed_rows("cuda")}
        speaker = stack.enter_context(speaker_of(scratch, streams, scheduler=gpu))
        for name in ("time.monotonic", "time.perf_counter"):
            stack.enter_context(mock.patch(name, clock))
        stack.enter_context(mock.patch("time.sleep", sleep))
        if words.no_preroll:
            stack.enter_context(mock.patch.object(preroll, "MOST", 1))
        worker: Any = speaker.worker
        worker.engine.runner = Standin(worker.config.deployment.engine, worker.engine.nodes["codec"].tokens)
        timed = Timed(clock, words)
        worker.trace = worker.engine.trace = timed
        began = clock.now
        row = run_streams(speaker, streams, words.seconds, words.rounds)
        row.update(steps=timed.steps, busy=timed.busy / (clock.now - began))
    return row


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,100,200", help="listeners, with commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="of sound that an answer has")
    parser.add_argument("--rounds", type=int, default=2, help="answers that each listener of steady load hears")
    parser.add_argument("--lm", type=_numbers, default=[2.1, 0.02, 0.009], help="ms a step, a row, a prompt's token")
    parser.add_argument("--codec", type=_numbers, default=[1.6, 0.1, 0.0], help="ms a step, a row")
    parser.add_argument("--host-ms", type=_numbers, default=[0.4, 0.02], help="of the host: a step, a row")
    parser.add_argument("--jitter", type=float, default=0.05, help="by which part steps take longer, on average")
    parser.add_argument("--stalls", type=float, default=0.01, help="steps of which something else takes the time")
    parser.add_argument("--stall-ms", type=float, default=10.0, help="how long that is")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-preroll", action="store_true", help="play the first piece as soon as it is there")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(words).items() if name != "out"}
    result: dict[str, Any] = {"environment": environment(("torch",)), "settings": settings, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for streams in words.streams.split(","):
            began = time.perf_counter()
            row = simulate(Path(folder, streams), int(streams), words)
            row["took_s"] = time.perf_counter() - began
            result["rows"].append(row)
    if words.out is not None:
        write(words.out, result)
    found = [{**summary(row), "busy": row["busy"]} for row in result["rows"]]
    table("simulated listeners", found, list(found[0]))


if __name__ == "__main__":
    main()
