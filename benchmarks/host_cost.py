"""What the host does for one row of a decode step while many listen to speech: everything but the model's own calls.

    python benchmarks/host_cost.py --out FILE.json                # 200 listeners of the tiny Orpheus, look-ahead on
    python benchmarks/host_cost.py --rows 16,64,200 --ending      # whose answers end, and who ask again

The real worker runs on the CPU in this process. Nodes compute next to nothing while it is measured: the language model
says codes in their order, the codec silence of the right length, so that what Python touches stays in the caches as it
does beside a GPU. Their calls are left out. It is CPU time of the thread, so that other programs on the machine do not
count. Listeners are out of step with each other, as they are after a while. The worker's clock is one that the
benchmark advances by ``--step-ms`` a step, so that the scheduler chooses the same steps on any machine. A fixed piece
of plain Python runs between the steps: a machine's speed changes while others use it, and host time in such yardsticks
stays about the same. The bytecodes of some further steps are counted; their number is the same everywhere. What only a
GPU has (its calls, plans of its kernels) is not seen.

Before, the loop is checked: with look-ahead a few listeners must hear what they hear without it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import environment, table
from gpu.report import write
from speech.families import FAMILIES, made, tiny
from speech.streams import Heard, Speaker, until
from torch import Tensor

from mstar.engine.eager import EagerRunner
from mstar.engine.engine import Flight
from mstar.engine.trace import Trace
from mstar.nn.node import Node, Sampled, Step
from mstar.spec.deployment import EngineOptions
from mstar_tts.orpheus.tokens import FRAME, OrpheusTokens

LONG, SHORT = 30.0, 4.0
"""Seconds of sound: of answers that go on for as long as is measured, and of those that end meanwhile."""
CONTEXT = 3072
"""Tokens that there is room for, for each listener."""
COUNTED = 8
"""Steps of the language model whose bytecodes are counted, those of the codec between them included."""


def yardstick() -> float:
    """CPU seconds of some 2,000 calls, look-ups and small objects, as a worker's loop makes them."""
    began = time.thread_time()
    table: dict[int, tuple[int, list[int]]] = {}
    for number in range(500):
        table[number & 63] = (number, [number])
        found = table.get(number & 31)
        if found is not None and isinstance(found, tuple):
            found[1].append(len(table))
    return time.thread_time() - began


class Standin(EagerRunner):
    """Runs Orpheus' steps without computing: results of the right shapes."""

    def __init__(self, options: EngineOptions, tokens: OrpheusTokens):
        super().__init__(options)
        self._first, self._codes = tokens.first_code, tokens.codes
        self._sound: dict[int, Tensor] = {}  # of one window, by its codes

    def run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        tracer = sys.gettrace()
        sys.settrace(None)  # what it does is not the host's
        try:
            return self._run(node, entry, step, inputs)
        finally:
            sys.settrace(tracer)

    def _run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if "ids" in inputs:
            place = (inputs["ids"][step.last] - self._first).div(self._codes, rounding_mode="floor")
            place = torch.where((place < 0) | (place >= FRAME - 1), 0, place + 1)
            return {"token": Sampled(self._first + place * self._codes)}
        size = inputs["codes"].shape[1]
        if size not in self._sound:
            self._sound[size] = super().run(node, entry, step, inputs)["samples"][:1].zero_()
        return {"samples": self._sound[size].expand(len(inputs["codes"]), -1)}


class Bytecodes:
    """Counts what the interpreter executes for the worker."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, step: Callable[[], object]) -> None:
        sys.settrace(self._seen)
        try:
            step()
        finally:
            sys.settrace(None)

    def _seen(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._seen


class Spent(Trace):
    """CPU seconds of this thread from mark to mark, by what the host was busy with. ``model`` is what is not ours."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self._planned = 0.0
        self._last = time.thread_time()

    def _mark(self, name: str) -> None:
        now = time.thread_time()
        self.seconds[name] += now - self._last
        self._last = now

    def begin(self) -> None:
        self._last = time.thread_time()  # what is between two steps is the listeners' affair

    def stage(self, name: str) -> None:
        self._mark(name)

    def planned(self) -> None:
        before = self.seconds["plan"]
        self._mark("plan")
        self._planned = self.seconds["plan"] - before

    def ran(self) -> None:
        self._mark("model")

    def launched(self, flight: Flight, captured: bool) -> None:
        node = _node(flight)
        self.steps[node] += 1
        self.rows[node] += len(flight.work)
        self._mark(f"commit {node}")
        self.seconds["plan"] -= self._planned
        self.seconds[f"plan {node}"] += self._planned

    def landed(self, flight: Flight) -> None:
        self._mark(f"land {_node(flight)}")

    def routed(self, flight: Flight) -> None:
        self._mark(f"route {_node(flight)}")

    def end(self, running: int, waiting: int, answering: Callable[[str], bool]) -> None:
        self._mark("rest")

    def rest(self, running: int, waiting: int) -> None:
        self._mark("rest")


def _node(flight: Flight) -> str:
    return str(flight.work[0].call.op.call.node)


@contextmanager
def speaker_of(scratch: Path, rows: int, lookahead: bool = True, **more: Any) -> Iterator[Speaker]:
    """:param more: fields of the deployment."""
    family = tiny(FAMILIES["orpheus"])
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_concurrent_requests": rows + 8,
        "engine": {"lookahead": lookahead},
        "resources": {"kv": {"tokens": (rows + 8) * CONTEXT}},
        **more,
    }
    speaker = Speaker(family, made(family, scratch / "orpheus"), options)
    try:
        yield speaker
    finally:
        speaker.close()


class Clock:
    """The worker's monotonic seconds."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def sound(scratch: Path, lookahead: bool) -> list[np.ndarray]:
    """What a few hear who come one after the other and whose answers have different lengths."""
    with speaker_of(scratch, 6, lookahead) as speaker:
        speaker.keep, answers = {}, []
        for number in range(6):
            answers.append(speaker.speak(0.3 + 0.2 * number, seed=number))
            for _ in range(3):
                speaker.step()
        until(speaker, answers)
        pieces = speaker.keep
    return [np.concatenate(pieces[name]) for name in sorted(pieces)]


def check(scratch: Path) -> float:
    """How far the sound with look-ahead is from that of the plain loop, at most."""
    plain, ahead = sound(scratch, False), sound(scratch, True)
    if [len(one) for one in plain] != [len(one) for one in ahead]:
        raise SystemExit("with look-ahead answers are of other lengths")
    worst = max(float(np.abs(one - other).max()) for one, other in zip(plain, ahead, strict=True))
    if worst > 1e-4:
        raise SystemExit(f"with look-ahead the sound is another: {worst}")
    return worst


def measure(scratch: Path, rows: int, steps: int, step_s: float, ending: bool) -> dict[str, Any]:
    clock = Clock()
    with speaker_of(scratch, rows) as speaker, mock.patch("time.monotonic", clock):
        seconds = SHORT if ending else LONG
        answers: list[Heard] = []

        def turn() -> None:
            if ending:
                for number, heard in enumerate(answers):
                    if not speaker.busy(heard):
                        answers[number] = speaker.speak(seconds)
            speaker.step()
            clock.now += step_s

        while len(answers) < rows:
            answers += [speaker.speak(seconds) for _ in range(min(2, rows - len(answers)))]
            turn()
        for _ in range(20):
            turn()
        worker: Any = speaker.worker
        worker.engine.runner = Standin(worker.config.deployment.engine, worker.engine.nodes["codec"].tokens)
        for _ in range(20):
            turn()
        spent: Any = Spent()
        worker.engine.trace = spent
        gc.collect()
        gc.freeze()  # as the server does when its models are ready
        sticks: list[float] = []
        while spent.steps["lm"] < steps:
            turn()
            sticks.append(yardstick())
        gc.unfreeze()
        parts, timed, timed_rows = dict(spent.seconds), dict(spent.steps), dict(spent.rows)
        codes, before = Bytecodes(), spent.steps["lm"]
        while spent.steps["lm"] < before + COUNTED:
            codes.of(speaker.worker.step)
            speaker.take()
            clock.now += step_s
        counted_rows = spent.rows["lm"] - timed_rows["lm"]
        speaker.cancel_all()
    model, plan = parts.pop("model"), parts.pop("plan")
    assert model > 0
    assert abs(plan) < 1e-6  # each was followed by a launch
    codec = sum(parts.pop(name) for name in list(parts) if name.endswith(" codec"))
    total, stick = sum(parts.values()), statistics.median(sticks)
    return {
        "rows": rows,
        "ending": ending,
        "row_us": 1e6 * total / timed_rows["lm"],
        "row_bytecodes": codes.count / counted_rows,
        "yardstick_us": 1e6 * stick,
        "row_sticks": total / timed_rows["lm"] / stick,
        "step_ms": 1e3 * total / timed["lm"],
        "codec_row_us": 1e6 * codec / timed_rows["codec"],
        "codec_step_ms": 1e3 * codec / timed["codec"],
        "steps": timed,
        "codec_rows": timed_rows["codec"] / timed["codec"],
        "parts_us": {
            name.removesuffix(" lm"): 1e6 * seconds / timed_rows["lm"]
            for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="200", help="listeners, with commas")
    parser.add_argument("--steps", type=int, default=150, help="steps of the language model that are measured")
    parser.add_argument("--step-ms", type=float, default=6.0, help="how long a step takes by the worker's clock")
    parser.add_argument("--ending", action="store_true", help="answers end, and who has heard one asks again")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(argv)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"environment": environment(("torch",))}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if not words.no_check:
            result["differs"] = check(scratch)
        result["rows"] = [
            measure(scratch, int(n), words.steps, words.step_ms / 1e3, words.ending) for n in words.rows.split(",")
        ]
    if words.out is not None:
        write(words.out, result)
    found = [{**row, **row["parts_us"]} for row in result["rows"]]
    columns = ("rows", "row_us", "row_bytecodes", "row_sticks", "step_ms", "codec_row_us", "codec_rows")
    table("host: a row of a step of the language model, of the codec", found, columns)
    table("µs of a row of the language model by part", found, ("rows", *result["rows"][0]["parts_us"]))


if __name__ == "__main__":
    main()
