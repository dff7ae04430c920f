"""Choosing tokens on a GPU: is it right, and what does a step of it cost beside one copy of its logits?

Each case is first compared with a sort in float64 (:func:`wrong`), then timed inside a CUDA graph of several copies, so
that launching is part of it and Python is not. Logits are bfloat16, as a model's head gives them. Two kinds of logits:
*text* falls with the rank as a language model's do, *flat* are random numbers, of which top-p keeps a fifth of the
vocabulary. ``copy_us`` is one copy of the logits by torch.

    python benchmarks/gpu_sampling.py --kernels --out results.json
    python benchmarks/gpu_sampling.py --kinds equal --rows 1,200 --vocab 156940
    git show b122d6d:core/src/mstar/nn/ops/cuda_sampling.py > /tmp/before.py   # the sixteen passes
    python benchmarks/gpu_sampling.py --vocab 156940 --before /tmp/before.py

Kernels are compiled for each vocabulary by a process of its own, all at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import environment, table
from gpu_ops import copy_bandwidth, microseconds
from torch import Tensor

from mstar.nn.ops import cuda_sampling, pdl
from mstar.nn.sampling import Changes
from mstar.resources.sampler_history import GROUP, flags_of

SEEN = 1000  # distinct tokens that a penalty knows of
NEAR = 2e-5  # of the distribution: what float32's sums may be off


@dataclass(frozen=True)
class Case:
    name: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    repetition: float = 1.0

    @property
    def filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


CASES = [
    Case("greedy", 0.0),
    Case("temperature", 1.0),
    Case("top-p 0.9", 1.0, top_p=0.9),
    Case("top-k 50", 0.7, top_k=50),
    Case("top-k 50, top-p 0.9", 0.6, top_p=0.9, top_k=50),
    Case("top-p 0.9, penalty", 0.6, top_p=0.9, repetition=1.3),
    Case("all", 0.6, top_p=0.9, top_k=50, repetition=1.3),
]


class Step:
    """One step's tensors."""

    def __init__(self, case: Case, kind: str, rows: int, vocab: int, device: str):
        self.case = case
        self.logits = make(kind, rows, vocab, device)
        self.slots = torch.randperm(rows, device=device)
        greedy = case.temperature == 0
        line = [1.0 if greedy else 1 / case.temperature, case.top_p, 0.0, case.repetition, 0.0, 0.0, float(greedy)]
        self.floats = torch.tensor([line], device=device).repeat(rows, 1)
        self.top_k = torch.full((rows,), case.top_k, device=device)
        self.uniforms = torch.rand(rows, dtype=torch.float64, device=device)
        self.which = torch.zeros(rows, dtype=torch.int64, device=device)
        self.words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
        if case.repetition != 1:
            self.histories = torch.randperm(rows, device=device) + 1
            self.marks = torch.zeros(rows + 1, vocab, dtype=torch.int32, device=device)
            self.flags = torch.zeros(rows + 1, flags_of(vocab), dtype=torch.uint8, device=device)
            seen = torch.randint(0, min(vocab, 30_000), (rows, SEEN), device=device)
            self.marks[1:].scatter_(1, seen, 1)
            self.flags[1:].scatter_(1, seen // GROUP, 1)

        self.changes = None
        if case.repetition != 1:
            self.changes = Changes(self.which, self.words, self.histories, self.marks, self.flags)

    def run(self) -> Tensor:
        row = (self.logits, self.slots, self.floats, self.top_k, self.uniforms)
        return cuda_sampling.sample(*row, self.case.filters, self.changes)

    def run_before(self, module: Any) -> Tensor:
        scores = self.logits
        if self.changes is not None:
            scores = scores.to(torch.float32, copy=True)
            module.edit(scores, self.which, self.words, self.slots, self.floats, self.histories, self.marks)
        chosen: Tensor = module.sample(scores, self.slots, self.floats, self.top_k, self.uniforms, self.case.filters)
        return chosen


def make(kind: str, rows: int, vocab: int, device: str) -> Tensor:
    if kind == "flat":
        return (torch.randn(rows, vocab, device=device) * 2).to(torch.bfloat16)
    if kind == "equal":
        return torch.full((rows, vocab), 1.5, dtype=torch.bfloat16, device=device)
    # A token's rank follows its number roughly, as in vocabularies of byte pairs.
    rank = torch.arange(vocab, device=device) + 1.0
    return (18 - 1.1 * rank.log() + torch.randn(rows, vocab, device=device) * 1.5).to(torch.bfloat16)


def wrong(step: Step) -> float:
    """Share of rows whose token is not the one whose interval of the cumulative distribution holds the row's number,
    after filters by a sort in float64; differences of :data:`NEAR` count for nothing."""
    case, got = step.case, step.run()
    scores = step.logits.float()
    if case.repetition != 1:
        seen = step.marks[step.histories] != 0
        factor = torch.tensor(case.repetition, device=scores.device)
        scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    bad = 0
    for row in range(len(got)):
        x = scores[row] * step.floats[step.slots[row], 0]
        token = int(got[row])
        if case.temperature == 0:
            bad += token != int((x == x.amax()).nonzero()[0])
            continue
        weight = (x.double() - x.amax()).exp()
        order = x.sort(descending=True).values
        least = order[min(case.top_k, len(x)) - 1] if case.top_k else order[-1]
        sides = []
        for slack in (-NEAR, NEAR):  # the threshold, were the sum a little less or more
            kept = weight * (x >= least)
            if case.top_p < 1:
                sorted_weight = (order.double() - x.amax()).exp() * (order >= least)
                above = sorted_weight.cumsum(0) - sorted_weight
                count = int((above < (case.top_p + slack) * sorted_weight.sum()).sum())
                kept = weight * (x >= order[max(count, 1) - 1])
            until = (kept.cumsum(0) / kept.sum())[token].item()
            share = (kept[token] / kept.sum()).item()
            sides.append(share > 0 and until - share - NEAR <= step.uniforms[row].item() <= until + NEAR)
        bad += not any(sides)
    return bad / len(got)


def kernels(step: Step) -> dict[str, float]:
    """Microseconds of each kernel of a step, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    step.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            step.run()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 5 for event in found.key_averages()}
    return {name[:60]: round(spent[name], 1) for name in sorted(spent, key=spent.__getitem__, reverse=True)[:8]}


def compile_all(vocabularies: Sequence[int], rest: Sequence[str]) -> None:
    """Have processes of their own compile what each size needs; they leave it in Triton's cache."""
    command = [sys.executable, __file__, "--check", "--rows", "1", "--kinds", "text", *rest]
    children = [subprocess.Popen([*command, "--vocab", str(size)], stdout=subprocess.DEVNULL) for size in vocabularies]
    if max([child.wait() for child in children]):
        raise SystemExit("a check failed: --check says which")


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("sampling_before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,64,200", help="batch sizes")
    parser.add_argument("--vocab", default="128256,156940,248320", help="sizes of the vocabulary")
    parser.add_argument(
        "--kinds", default="text,flat", help="of text, flat, equal (that no buffer holds: the slow way)"
    )
    parser.add_argument("--check", action="store_true", help="compare with the sort only")
    parser.add_argument("--before", type=Path, help="a cuda_sampling.py of before, measured beside")
    parser.add_argument("--kernels", action="store_true", help="list the kernels' times at the most rows")
    parser.add_argument("--pdl", action="store_true", help="launch kernels while those before end, as a worker does")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    if options.pdl:
        pdl.use(True)
    if not options.check:
        compile_all(list(map(int, options.vocab.split(","))), ["--pdl"] if options.pdl else [])
    torch.manual_seed(7)
    before = None if options.before is None else load(options.before)
    results = []
    most = max(map(int, options.rows.split(",")))
    with torch.inference_mode():
        bandwidth = None if options.check else copy_bandwidth()
        for vocab in map(int, options.vocab.split(",")):
            for rows in map(int, options.rows.split(",")):
                for kind in options.kinds.split(","):
                    for case in CASES:
                        if kind != "text" and not case.filters:
                            continue  # the logits do not matter
                        step = Step(case, kind, rows, vocab, options.device)
                        result: dict[str, Any] = {"vocab": vocab, "rows": rows, "kind": kind, "case": case.name}
                        if rows <= 32:
                            result["wrong"] = wrong(step)
                        if not options.check:
                            result["us"] = microseconds(step.run)
                            if before is not None:
                                result["before_us"] = microseconds(lambda step=step: step.run_before(before))
                            target = torch.empty_like(step.logits)
                            result["copy_us"] = microseconds(lambda step=step, target=target: target.copy_(step.logits))
                            if options.kernels and rows == most:
                                result["kernels"] = kernels(step)
                        results.append(result)
    columns = ("vocab", "rows", "kind", "case", "wrong", "us", "before_us", "copy_us")
    table("Sampling", results, columns, 1)
    for result in results:
        if "kernels" in result:
            print(result["vocab"], result["rows"], result["kind"], result["case"], result["kernels"])
    content = {
        "environment": environment(("torch", "triton")),
        "copy_bytes_per_second": bandwidth,
        "results": results,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if not any(result.get("wrong") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
