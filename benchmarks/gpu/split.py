"""Prompts and decoding apart, as the server runs them, beside one rank: the part ``split`` of ``ranks_gpu.py``.

Some requests decode all the time; meanwhile others come with long prompts and want few tokens. What matters is how long
the former wait between two tokens, when the latter have their first one, and what a move costs. First both layouts must
say the same, token for token in float32, on a small shape.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu.checkpoints import publish
from gpu.child import failure
from gpu.deploy import deployment
from gpu.engine import bench_registry
from gpu.shapes import CHECKED, SHAPES, sizes_of
from mstar.cluster.base import WorkerConfig
from mstar.cluster.choice import processes
from mstar.runtime.deployment_files import packaged_deployment
from mstar.spec.deployment import merge_deployment
from mstar.spec.request import Cancel, Done, Emit, EngineRequest, Event, Failed, SamplingParams
from mstar.worker.moves import STAGES

__all__ = ["measure"]

APART: Mapping[str, Any] = {"llm": {"prefill": 1, "decode": 0}}
PATIENCE_S = 60.0
STALL_S = 0.015
"""A wait for the next token that counts as one: several steps long."""


@dataclass
class _Answer:
    """*times*: of its tokens, after it was asked for."""

    asked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: Done | Failed | None = None


class _Served:
    """One layout of one shape, in its processes."""

    def __init__(self, shape: str, folder: Path, device: str, **changed: Any):
        registry, sizes = bench_registry(), sizes_of(shape)
        spec = registry.model(shape)
        merged = merge_deployment(shape, packaged_deployment(spec), deployment(sizes, device, changed))
        config = WorkerConfig(
            key=shape, weights=str(folder / shape), deployment=merged, plugins=(), extra_plugins=("gpu.plugin",)
        )
        self.executor: Any = processes(config, self._take, lambda phase: None, registry)
        self.answers: dict[str, _Answer] = {}
        self._changed = asyncio.Event()

    def _take(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            answer = self.answers[event.id]
            if isinstance(event, Emit):
                answer.tokens.extend(event.data)
                answer.times.extend([now] * len(event.data))
                self.executor.ack(event.id, event.stream, 1)
            else:
                answer.end = event
        self._changed.set()

    def ask(self, prompt: np.ndarray, tokens: int) -> _Answer:
        name = str(len(self.answers))
        answer = self.answers[name] = _Answer(time.perf_counter())
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=7)
        self.executor.submit(EngineRequest(id=name, inputs={"prompt": prompt}, sampling={"sampler": params}))
        return answer

    async def until(self, *answers: _Answer, tokens: int | None = None) -> None:
        """Until all have ended, or have so many *tokens*."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(a.end if tokens is None else len(a.tokens) >= tokens or a.end for a in answers):
                self._changed.clear()
                await self._changed.wait()
        failed = [answer.end for answer in answers if isinstance(answer.end, Failed)]
        if failed:
            raise RuntimeError(f"a request failed: {failed[0].message}")

    def cancel(self) -> None:
        for name, answer in self.answers.items():
            if answer.end is None:
                self.executor.cancel(Cancel(id=name))


@asynccontextmanager
async def _serving(shape: str, folder: Path, device: str, **changed: Any) -> AsyncIterator[_Served]:
    served = _Served(shape, folder, device, **changed)
    await served.executor.start()
    try:
        yield served
    finally:
        await served.executor.stop()


async def _said(shape: str, folder: Path, device: str, **changed: Any) -> list[list[int]]:
    draw = np.random.default_rng(3)
    async with _serving(shape, folder, device, dtype="float32", **changed) as served:
        vocab = SHAPES[shape].facts.vocab
        answers = [served.ask(draw.integers(0, vocab, length), 24) for length in (3, 40, 17)]
        await served.until(*answers)
        return [answer.tokens for answer in answers]


async def _loaded(shape: str, folder: Path, device: str, **changed: Any) -> dict[str, Any]:
    """Decoding requests beside long prompts."""
    small = shape == "tiny"
    decoding, prompts, length = (2, 3, 24) if small else (16, 12, 2048)
    draw, vocab = np.random.default_rng(5), SHAPES[shape].facts.vocab
    async with _serving(shape, folder, device, **changed) as served:
        most = sizes_of(shape).context - 64
        steady = [served.ask(draw.integers(0, vocab, 16), most) for _ in range(decoding)]
        await served.until(*steady, tokens=4)
        began = time.perf_counter()
        readers = []
        for _ in range(prompts):  # two of them at a time
            readers.append(served.ask(draw.integers(0, vocab, length), 8))
            if len(readers) > 1:
                await served.until(readers[-2])
        await served.until(readers[-1])
        seconds = time.perf_counter() - began
        between = [pair for answer in steady for pair in _gaps(answer, began)]
        gaps = [after - before for before, after in between]
        stalls = {
            after for before, after in between if after - before > STALL_S
        }  # all who wait have their next at once
        tokens = sum(sum(t >= began for t in answer.times) for answer in steady) + sum(len(a.tokens) for a in readers)
        status = await served.executor.status()
        moves, ways = status["moves"], {rank["way"] for rank in status["ranks"]}
        served.cancel()
    done, stages = moves.get("done", 0), moves.get("stages") or dict.fromkeys(STAGES, 0.0)
    return {
        "tokens_s": tokens / seconds,
        "first_token_s": statistics.median(answer.times[0] - answer.asked for answer in readers),
        "gap_median_s": statistics.median(gaps),
        "gap_p99_s": sorted(gaps)[int(len(gaps) * 0.99)],
        "gap_max_s": max(gaps),
        "stalls": len(stalls),
        "way": ", ".join(sorted(ways)),
        "moves": done,
        "ms_a_move": moves["seconds"] / done * 1e3 if done else 0.0,
        **{f"ms_{stage}": seconds / max(done, 1) * 1e3 for stage, seconds in stages.items()},
        "mib_a_move": moves["bytes"] / done / 2**20 if done else 0.0,
    }


def _gaps(answer: _Answer, since: float) -> list[tuple[float, float]]:
    """When a token came and when the next, of those that came *since*."""
    pairs = zip(answer.times, answer.times[1:], strict=False)
    return [(before, after) for before, after in pairs if before >= since]


def _layouts(device: str) -> dict[str, dict[str, Any]]:
    """One rank, and two by each way that states may move."""
    lanes = "nccl" if device == "cuda" else "gloo"
    apart = {f"apart, {way}": {"placement": APART, "engine": {"values": way}} for way in (lanes, "shm")}
    return {"one rank": {}, **apart}


async def measure(shapes: Sequence[str], folder: Path, device: str) -> dict[str, Any]:
    """The check, then each of *shapes* on one rank and apart."""
    checked = "tiny" if device == "cpu" else CHECKED[0]
    for shape in dict.fromkeys((checked, *shapes)):
        publish(SHAPES[shape], folder / shape, "cpu" if device == "cpu" else "cuda:0")
    said = {name: await _said(checked, folder, device, **changed) for name, changed in _layouts(device).items()}
    if any(one != said["one rank"] for one in said.values()):
        raise RuntimeError(f"apart the ranks say something else than one alone: {said}")
    found = {}
    for shape in shapes:
        rows = []
        for name, changed in _layouts(device).items():
            rows.append({"layout": name, **await _loaded(shape, folder, device, **changed)})
        found[shape] = {"rows": rows}
    return found


def main() -> None:
    told = json.loads(sys.argv[1])
    try:
        found = asyncio.run(measure(told["shapes"], Path(told["folder"]), told["device"]))
    except Exception as error:
        traceback.print_exc()
        found = failure(error)
    with Path(told["out"]).open("a") as out:
        print(json.dumps({"part": "split", "rank": 0, "result": found}), file=out, flush=True)
    sys.stdout.flush()
    os._exit("failed" in found)


if __name__ == "__main__":
    main()
