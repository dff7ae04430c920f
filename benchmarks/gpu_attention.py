"""Attention with FlashInfer on a GPU: is it right, and how far is it from the limit?

First every way to attend is compared with float32 torch over random shapes, then captured steps are replayed with
changing contexts, planned ahead of the device. Then decoding is timed beside the time in which the keys and values
could be copied, prefill as arithmetic, and planning on the host. About a minute with FlashInfer's kernels compiled.

    python benchmarks/gpu_attention.py --out gpu_attention.json
    python benchmarks/gpu_attention.py --check        # no timings
    python benchmarks/gpu_attention.py --all          # also windows of 64 and 256, and soft caps: they may compile
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment
from torch import Tensor

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, flashinfer_rows
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.staging import Lane, Stage

__all__ = ["main"]

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda", 0)
TOLERANCE = 2e-2
"""Of bfloat16 results against float32, relative and absolute: two roundings and the weights' own."""
SHAPES = ((24, 8, 128), (16, 8, 128), (32, 8, 128))
"""Query heads, key heads, head size of Llama-3.2-3B, Qwen3-0.6B, Qwen3-8B."""
BATCHES = (1, 8, 32, 64, 128)
CONTEXT = 1024


class Case:
    """Random contexts in a memory, and the right answer for any step over them."""

    def __init__(self, seed: int, rows: int, kv_heads: int, dim: int, page: int, most: int):
        self.random = np.random.default_rng(seed)
        self.page, self.pages = page, -(-most // page)
        self.memory = KVMemory(1, (rows * self.pages + 1) * page, kv_heads, dim, DTYPE, DEVICE)
        self.memory.data.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
        shuffled = self.random.permutation(rows * self.pages).astype(np.int32)
        self.tables = shuffled.reshape(rows, self.pages)

    def batch(self, lengths: Any, starts: Any, **fields: Any) -> KVBatch:
        tables = self.tables[: len(lengths)]
        most = self.pages
        arrays = (np.asarray(lengths, np.int64), np.asarray(starts, np.int64))
        return KVBatch(*arrays, tables, self.page, most_pages=most, **fields)

    def own(self, batch: KVBatch) -> tuple[Tensor, Tensor]:
        """Keys and values of the step's own tokens."""
        tokens = [np.arange(s, s + n) for s, n in zip(batch.starts, batch.lengths, strict=True)]
        size = batch.page_size
        places = [batch.tables[row, at // size].astype(np.int64) * size + at % size for row, at in enumerate(tokens)]
        found = self.memory.data[0][:, torch.from_numpy(np.concatenate(places)).to(DEVICE)]
        return found[0], found[1]

    def answer(
        self, batch: KVBatch, q: Tensor, own: Tensor | None, window: int | None, causal: bool, softcap: float | None
    ) -> Tensor:
        """In float32, row by row. *own*: keys and values ``[2, N, heads, dim]`` that stand beside the memory."""
        parts, begin = [], 0
        for row, (length, start) in enumerate(zip(batch.lengths.tolist(), batch.starts.tolist(), strict=True)):
            places = (batch.tables[row][:, None] * batch.page_size + np.arange(batch.page_size)).reshape(-1)
            end = start + (length if batch.step_kv == "written" else 0)
            kv = self.memory.data[0][:, torch.from_numpy(places[:end]).to(DEVICE)].float()
            if own is not None:
                kv = torch.cat((kv, own[:, begin : begin + length].float()), 1)
            parts.append(attention(q[begin : begin + length].float(), kv[0], kv[1], window, causal, softcap))
            begin += length
        return torch.cat(parts)


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, causal: bool, softcap: float | None) -> Tensor:
    """Of queries that end where the keys end. *causal* and *window* as in ``KVPlan.attend``."""
    shared, n, length = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    logits = torch.einsum("nhd,lhd->hnl", q, k) * q.shape[2] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    asked = torch.arange(length - n, length, device=q.device)[:, None]
    keys = torch.arange(length, device=q.device)[None]
    seen = keys <= asked if causal else torch.ones(n, length, dtype=torch.bool, device=q.device)
    if window is not None:
        seen = seen & ((keys > asked - window) | (not causal) & (keys >= length - n))
    return torch.einsum("hnl,lhd->nhd", torch.softmax(logits.masked_fill(~seen, -torch.inf), -1), v)


def worst(got: Tensor, wanted: Tensor) -> float:
    """Largest error in units of the tolerance; more than 1 is wrong."""
    error = (got.float() - wanted).abs() / (TOLERANCE * (1 + wanted.abs()))
    return float(error.nan_to_num(1e9).max())


# --- correctness ------------------------------------------------------------------------------------------------------
def steps(case: Case, seed: int) -> Iterator[tuple[str, KVBatch, dict[str, Any]]]:
    """One batch of each kind, of random sizes."""
    random, rows, most = np.random.default_rng(seed), len(case.tables), case.pages * case.page

    def draw(least: int, below: int) -> Any:
        return random.integers(least, below, rows)

    ones = np.ones(rows, np.int64)
    contexts = draw(0, most - 1)
    contexts[0] = 0
    yield "decode", case.batch(ones, contexts), {}
    mixed = np.where(np.arange(rows) < rows // 2, 1, draw(1, 200))
    yield "mixed", case.batch(mixed, draw(0, most - 200)), {}
    long = draw(150, 400)
    yield "long prompts", case.batch(long, draw(0, most - 400)), {}
    yield "whole prompts", case.batch(long, ones * 0), {}
    short = draw(1, 20)
    yield "short, not causal", case.batch(short, draw(0, most - 20)), {"causal": False}
    yield "long, not causal", case.batch(long, draw(0, most - 400)), {"causal": False}
    starts = draw(0, most)
    starts[0] = 0
    for causal in (True, False):
        yield "beside", case.batch(short, starts, step_kv="beside"), {"causal": causal}
        yield "beside, long", case.batch(long, starts, step_kv="beside"), {"causal": causal}
    yield "cross, one query", case.batch(ones, draw(1, most), step_kv="none"), {"causal": False}
    yield "cross, many", case.batch(long, draw(1, most), step_kv="none"), {"causal": False}


def check_steps(backend: FlashInferAttention, everything: bool) -> list[dict[str, Any]]:
    found = []
    for seed, (heads, kv_heads, dim, page) in enumerate(
        ((4, 4, 64, 16), (6, 2, 128, 16), (16, 2, 128, 32), (24, 8, 128, 1), (32, 8, 128, 16), (8, 2, 256, 16),
         (8, 8, 64, 1500), (8, 2, 128, 48))
    ):  # fmt: skip
        case = Case(seed, 6, kv_heads, dim, page, max(1500, 2 * page if page < 1000 else page))
        ways: list[dict[str, Any]] = [{}]
        if everything or (dim == 128 and heads // kv_heads >= 4):
            ways.append({"window": 100})
        if everything:
            ways.append({"softcap": 20.0})
        for name, batch, how in steps(case, seed):
            for way in ways:
                if way.get("window") and batch.step_kv != "written":
                    continue
                found.append(check_step(backend, case, batch, heads, {**how, **way}, name))
    found += check_rings(backend) + check_segments(backend)
    return found


def check_step(
    backend: FlashInferAttention, case: Case, batch: KVBatch, heads: int, how: dict[str, Any], name: str
) -> dict[str, Any]:
    total, (kv_heads, dim) = int(batch.lengths.sum()), (case.memory.kv_heads, case.memory.head_dim)
    packed = torch.randn(total, heads + 2 * kv_heads, dim, device=DEVICE).to(DTYPE)
    q, k, v = packed.split((heads, kv_heads, kv_heads), 1)  # strided, as models hand them on
    stage = Stage(DEVICE)
    stage.begin()
    plan = backend.plan_kv(case.memory, batch, stage, "check")
    stage.send()
    if batch.step_kv == "written":
        k, v = case.own(batch)
    got = plan.attend(0, q, *((None, None) if batch.step_kv == "none" else (k, v)), **how)
    beside = torch.stack((k, v)) if batch.step_kv == "beside" else None
    causal = how.get("causal", True) and batch.step_kv != "none"
    wanted = case.answer(batch, q, beside, how.get("window"), causal, how.get("softcap"))
    shape = f"{heads}/{kv_heads} heads of {dim}, pages of {case.page}"
    return {"case": name, "shape": shape, "how": how, "error": worst(got, wanted)}


def check_rings(backend: FlashInferAttention) -> list[dict[str, Any]]:
    """Rings that have forgotten: their places, oldest first, are the table."""
    case = Case(99, 4, 2, 128, 1, 300)
    batch = case.batch([1, 1, 3, 2], [99, 50, 99, 99], gaps=np.asarray([1000, 0, 7, 99]))
    return [check_step(backend, case, batch, 8, {"window": 100}, "ring")]


def check_segments(backend: FlashInferAttention) -> list[dict[str, Any]]:
    found = []
    for heads, kv_heads, dim, lengths in ((16, 16, 64, (300, 1, 70)), (8, 2, 128, (5, 9, 2, 0, 3)), (8, 8, 256, (90,))):
        q, k, v = (torch.randn(sum(lengths), h, dim, device=DEVICE).to(DTYPE) for h in (heads, kv_heads, kv_heads))
        for causal in (False, True):
            got = backend.plan_ragged(lengths, Stage(q.device), "ragged").attend(q, k, v, causal=causal)
            parts = [t.float().split(lengths) for t in (q, k, v)]
            wanted = torch.cat(
                [attention(a, b, c, None, causal, None) for a, b, c in zip(*parts, strict=True) if len(a)]
            )
            shape = f"{heads}/{kv_heads} heads of {dim}"
            found.append({"case": "segments", "shape": shape, "how": {"causal": causal}, "error": worst(got, wanted)})
    return found


def check_lanes(backend: FlashInferAttention, sizes: Sequence[int] = (1, 7, 32)) -> list[dict[str, Any]]:
    """Replays of captured steps: contexts change, and no step waits for the one before."""
    found = []
    for heads, kv_heads, dim, window in ((24, 8, 128, None), (32, 8, 128, None), (16, 8, 64, None), (32, 8, 128, 100)):
        for rows in sizes:
            case, stage, lane = Case(rows, rows, kv_heads, dim, 16, 3000), Stage(DEVICE), Lane(rows, DEVICE)
            q = torch.randn(rows, heads, dim, device=DEVICE).to(DTYPE)

            def plan(starts: Any, case: Case = case, stage: Stage = stage, lane: Lane = lane) -> tuple[Any, KVBatch]:
                stage.begin(lane)
                batch = case.batch(np.ones(len(starts), np.int64), starts)
                planned = backend.plan_kv(case.memory, batch, stage, "lane")
                stage.send()
                return planned, batch

            def run(planned: Any, q: Tensor = q, window: int | None = window) -> Tensor:
                out: Tensor = planned.attend(0, q, None, None, window=window)
                return out

            graph, out = capture(lambda: plan(np.full(rows, 10))[0], run)  # noqa: B023
            results = []
            for _ in range(24):
                _, batch = plan(case.random.integers(0, int(case.random.integers(2, 2999)), rows))
                graph.replay()
                results.append((batch, out.clone()))
            errors = [worst(got, case.answer(batch, q, None, window, True, None)) for batch, got in results]
            shape = f"{heads}/{kv_heads} heads of {dim}, {rows} rows"
            found.append({"case": "lane", "shape": shape, "how": {"window": window}, "error": max(errors)})
    return found


def capture(plan: Callable[[], Any], run: Callable[[Any], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    planned = plan()
    run(planned)
    torch.cuda.synchronize()
    planned = plan()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(planned)
    return graph, out


# --- time -------------------------------------------------------------------------------------------------------------
def seconds(run: Callable[[], Any], times: int = 10) -> float:
    """Median device time of *run*."""
    run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]  # type: ignore[no-untyped-call]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[times // 2] / 1e3


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def time_decode(backend: FlashInferAttention, bandwidth: float) -> list[dict[str, Any]]:
    lines = [
        (shape, rows, page, cores, CONTEXT)
        for shape in SHAPES
        for rows in BATCHES
        for page in ((16, 32, 64) if shape[0] == 32 else (16,))
        for cores in ("tensor", "cuda")
    ]
    lines += [(SHAPES[-1], rows, 16, "tensor", 8192) for rows in (1, 8)]
    return [decode_line(backend, bandwidth, *line) for line in lines]


def decode_line(
    backend: FlashInferAttention,
    bandwidth: float,
    shape: tuple[int, int, int],
    rows: int,
    page: int,
    cores: str,
    context: int,
) -> dict[str, Any]:
    """Layers with memories of their own in one graph, so that none finds its keys in the cache."""
    heads, kv_heads, dim = shape
    size = rows * context * KVMemory.token_bytes(1, kv_heads, dim, DTYPE)
    layers = max(3, min(24, (1 << 32) // size))
    flashinfer_rows._SHARED = 1 if cores == "tensor" else 999
    stage, lane = Stage(DEVICE), Lane(rows, DEVICE)
    per_row = context // page + 1
    memory = KVMemory(layers, rows * per_row * page, kv_heads, dim, DTYPE, DEVICE)
    memory.data.normal_()
    tables = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    batch = KVBatch(np.ones(rows, np.int64), np.full(rows, context - 1, np.int64), tables, page)
    q = torch.randn(rows, heads, dim, device=DEVICE).to(DTYPE)

    def plan() -> Any:
        stage.begin(lane)
        planned = backend.plan_kv(memory, batch, stage, "decode")
        stage.send()
        return planned

    graph, _ = capture(plan, lambda p: [p.attend(layer, q, None, None) for layer in range(layers)][-1])
    spent = seconds(graph.replay) / layers
    host = []
    for _ in range(60):
        stage.begin(lane)
        begin = time.perf_counter()
        backend.plan_kv(memory, batch, stage, "decode")
        host.append(time.perf_counter() - begin)
        stage.send()
    torch.cuda.synchronize()
    return {
        "heads": f"{heads}/{kv_heads}", "dim": dim, "rows": rows, "context": context, "page": page, "cores": cores,
        "us": spent * 1e6, "floor_us": size / bandwidth * 1e6, "of_floor": size / bandwidth / spent,
        "plan_us": sorted(host)[30] * 1e6,
    }  # fmt: skip


def time_prefill(backend: FlashInferAttention) -> list[dict[str, Any]]:
    """One long prompt, and eight prompts of a few tokens behind 1,024: where does fa3 begin to pay?"""
    found = []
    for heads, kv_heads, dim in (*SHAPES, (8, 2, 256), (16, 8, 64)):
        cases = [(1, n, 0) for n in (512, 2048, 8192)] + [(8, n, CONTEXT) for n in (8, 16, 32, 64, 128, 256)]
        for rows, n, start in cases:
            case = Case(0, rows, kv_heads, dim, 16, start + n)
            batch = case.batch(np.full(rows, n), np.full(rows, start))
            q = torch.randn(rows * n, heads, dim, device=DEVICE).to(DTYPE)
            line: dict[str, Any] = {"heads": f"{heads}/{kv_heads}", "dim": dim, "rows": rows, "queries": n}
            for name, threshold in (("fa2", 1 << 40), ("fa3", 0)):
                flashinfer_rows._LONG = threshold
                work = 4 * heads * dim * rows * (n * start + n * n / 2)
                host, spent = prefill_times(backend, case, batch, q)
                line |= {
                    f"{name}_us": spent * 1e6,
                    f"{name}_tflops": work / spent / 1e12,
                    f"{name}_host_us": host * 1e6,
                }
            found.append(line)
    return found


def prefill_times(backend: FlashInferAttention, case: Case, batch: KVBatch, q: Tensor) -> tuple[float, float]:
    """Seconds of planning and launching one layer on the host, and of one layer on the device."""
    stage, host = Stage(DEVICE), []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        stage.begin()
        plan = backend.plan_kv(case.memory, batch, stage, "prefill")
        stage.send()
        plan.attend(0, q, None, None)
        host.append(time.perf_counter() - begin)
    return min(host), seconds(lambda: plan.attend(0, q, None, None))


def show(title: str, lines: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for line in lines:
        print("  " + "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--all", action="store_true", help="also kernels that may have to be compiled first")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    began, facts = time.perf_counter(), environment(("torch", "flashinfer-python", "triton"))
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = FlashInferAttention()
    refusals = {
        f"{mode} {dim}": backend.supports(AttentionNeed(mode, DEVICE, DTYPE, 32, 8, dim, 16))
        for mode in ("kv", "ragged")
        for dim in (64, 128, 256)
    }
    refusals["window"] = backend.supports(AttentionNeed("kv", DEVICE, DTYPE, 32, 8, 128, 1, frozenset({9})))
    refusals["page 1500"] = backend.supports(AttentionNeed("kv", DEVICE, DTYPE, 16, 8, 64, 1500))
    print(f"start-up checks in {time.perf_counter() - began:.1f} s: {refusals}")
    checks = check_steps(backend, arguments.all) + check_lanes(backend)
    wrong = [line for line in checks if line["error"] > 1]
    print(f"{len(checks)} checks in {time.perf_counter() - began:.1f} s, {len(wrong)} wrong; "
          f"worst error {max(line['error'] for line in checks):.2f} of the tolerance")  # fmt: skip
    show("WRONG", wrong) if wrong else None
    results: dict[str, Any] = {"refusals": refusals, "checks": checks}
    if not arguments.check:
        bandwidth = copy_bandwidth()
        print(f"copy {bandwidth / 1e12:.2f} TB/s")
        results |= {
            "copy_bytes_per_s": bandwidth,
            "decode": time_decode(backend, bandwidth),
            "prefill": time_prefill(backend),
        }
        show("decode", results["decode"])
        show("prefill", results["prefill"])
    results["seconds"] = time.perf_counter() - began
    if arguments.out is not None:
        content = {"name": "gpu_attention", "environment": facts, "results": results}
        arguments.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\n{results['seconds']:.0f} s")
    return int(bool(wrong) or any(refusals.values()))


if __name__ == "__main__":
    sys.exit(main())
