"""Decoding with one kernel a layer, beside FlashInfer with the kernel that rotates and stores before it, on a GPU.

First results and stored keys of captured steps, replayed with changing contexts, are compared with float32 torch. Then
both ways are timed in CUDA graphs over layers with memories of their own, beside the time in which the keys and values
could be copied. About two minutes.

    python benchmarks/gpu_decode_attention.py --out gpu_decode_attention.json
    python benchmarks/gpu_decode_attention.py --check        # no timings
    python benchmarks/gpu_decode_attention.py --sweep        # also blocks, warps and stages other than the default
    python benchmarks/gpu_decode_attention.py --shape 16/4/256 --contexts 1024 --rows 8,16,32,64,128 --sweep
    python benchmarks/gpu_decode_attention.py --shape 16/4/256 --contexts 512 --rows 32,64,128 --longest 16384
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment
from gpu_attention import (
    DEVICE,
    DTYPE,
    SHAPES,
    Case,
    attention,
    capture,
    copy_bandwidth,
    seconds,
    show,
    worst,
)
from torch import Tensor

from mstar.nn import ops
from mstar.nn.ops import HeadNorms, cuda_attention
from mstar.nn.ops.reference import rotate_store, rotation
from mstar.nn.rotary import Rotation
from mstar.resources.attention import KVBatch, KVMemory, triton_decode
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.staging import Lane, Stage, to_device

__all__ = ["main"]

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 1024, 8192)
WAYS: tuple[tuple[int, int, int, int | None, float | None], ...] = (
    (24, 8, 128, None, None),
    (16, 8, 128, None, None),
    (32, 8, 128, 100, None),
    (8, 8, 64, None, 20.0),
    (16, 2, 256, None, None),
    (16, 4, 256, None, None),
    (16, 1, 128, 7, None),
)
"""Query heads, key heads, head size, window, soft cap."""
LAUNCHES = (
    (64, 4, 3),
    (64, 4, 5),
    (64, 4, 7),
    (32, 4, 5),
    (32, 4, 7),
    (32, 2, 7),
    (64, 8, 5),
    (128, 8, 5),
    (128, 4, 3),
)
"""Tokens of a block, warps, stages."""
WIDE_LAUNCHES = ((32, 4, 5), (32, 4, 3), (32, 4, 7), (16, 4, 5), (16, 4, 7), (32, 8, 5), (64, 8, 3))
"""Likewise, of heads of 256."""
SWEPT = ((1, 1024), (1, 8192), (4, 1024), (8, 1024), (16, 1024))
"""Rows and contexts with which launches are compared."""


class Layers:
    """A lane's steps over *memory*, layer by layer: with the kernel, or FlashInfer's way."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, rows: int, q_heads: int, normed: bool):
        self.backend, self.memory, self.rows, self.q_heads = backend, memory, rows, q_heads
        dim = memory.head_dim
        frequencies = 1 / 500_000 ** (torch.arange(dim // 2) / (dim // 2))
        self.inverse = torch.cat((-frequencies, frequencies)).to(DEVICE)
        count = q_heads + 2 * memory.kv_heads
        self.heads = torch.randn(rows, count, dim, device=DEVICE).to(DTYPE)
        weights = torch.rand(2, dim, device=DEVICE).to(DTYPE)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
        self.stage, self.lane = Stage(DEVICE), Lane(rows, DEVICE)
        self.rotation = Rotation(*rotation(torch.arange(rows, device=DEVICE), self.inverse, 1.0, DTYPE))
        self.places: Tensor | None = None

    def plan(self, batch: KVBatch) -> Any:
        self.stage.begin(self.lane)
        plan = self.backend.plan_kv(self.memory, batch, self.stage, "decode")
        size, row = batch.page_size, np.arange(self.rows)
        places = batch.tables[row, batch.starts // size].astype(np.int64) * size + batch.starts % size
        self.places = self.stage.put("places", places)
        self.stage.send()
        return plan

    def fused(self, plan: Any, layer: int, window: int | None = None, softcap: float | None = None) -> Tensor:
        arguments = (layer, self.heads, self.q_heads, self.rotation, self.norms, self.places)
        mixed: Tensor | None = plan.attend_heads(*arguments, window=window, softcap=softcap)
        if mixed is None:
            raise RuntimeError("the plan has no kernel for this")
        return mixed

    def two(self, plan: Any, layer: int) -> Tensor:
        cache = (*self.memory.keys_values(layer), self.places)
        q, k, v = ops.rotate_store(self.heads, self.q_heads, *self.rotation, self.norms, *cache)
        mixed: Tensor = plan.attend(layer, q, k, v)
        return mixed


# --- correctness ------------------------------------------------------------------------------------------------------
def check_replays(backend: FlashInferAttention, shape: tuple[int, ...] | None) -> list[dict[str, Any]]:
    """Of all ways, or of one *shape*."""
    found = []
    ways = [way for way in WAYS if shape in (None, way[:3])]
    for (heads, kv_heads, dim, window, softcap), rows, page in itertools.product(ways, (1, 3, 8, 16), (16, 64)):
        case = Case(rows, rows, kv_heads, dim, page, 3000)
        layers = Layers(backend, case.memory, rows, heads, normed=rows != 3)
        ones = np.ones(rows, np.int64)
        graph, out = capture(
            lambda: layers.plan(case.batch(ones, ones * 40)),  # noqa: B023
            lambda plan: layers.fused(plan, 0, window, softcap),  # noqa: B023
        )
        error = 0.0
        for most in (2, 60, 130, 700, 2999, 2999, 2999, 20):
            layers.heads.normal_()
            batch = case.batch(ones, case.random.integers(0, most, rows))
            layers.plan(batch)
            wanted, keys = answer(case, batch, layers, window, softcap)
            graph.replay()
            first = out.clone()
            error = max(error, worst(out, wanted), worst(case.memory.keys_values(0)[0][layers.places], keys))
            graph.replay()
            if not torch.equal(first, out):
                error = float("inf")  # the same step twice, not the same result
        shape = f"{heads}/{kv_heads} heads of {dim}, {rows} rows, pages of {page}"
        found.append({"shape": shape, "window": window, "softcap": softcap, "error": error})
    return found


def answer(
    case: Case, batch: KVBatch, layers: Layers, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """In float32: the results, and the keys that are to be stored."""
    norms = layers.norms and HeadNorms(layers.norms.q.float(), layers.norms.k.float(), layers.norms.eps)
    cos, sin = layers.rotation
    heads = layers.heads.float()
    q, k, v = rotate_store(heads, layers.q_heads, cos.float(), sin.float(), norms, None, None, None)
    size, results = batch.page_size, []
    for row, start in enumerate(batch.starts.tolist()):
        token = np.arange(start)
        places = to_device(batch.tables[row, token // size].astype(np.int64) * size + token % size, DEVICE)
        old = case.memory.data[0][:, places].float()
        both = torch.cat((old, torch.stack((k[row], v[row]))[:, None]), 1)
        results.append(attention(q[row : row + 1], both[0], both[1], window, True, softcap))
    return torch.cat(results), k.flatten(1)


# --- time -------------------------------------------------------------------------------------------------------------
def time_line(
    backend: FlashInferAttention,
    bandwidth: float,
    shape: tuple[int, int, int],
    rows: int,
    context: int,
    longest: int = 0,
) -> dict[str, Any]:
    """Microseconds a layer. Each layer of a graph has a memory of its own, so that none finds its keys in the cache.

    :param longest: context of the first row, if it has another one.
    """
    heads, kv_heads, dim = shape
    longest = longest or context
    size = (rows * context + longest - context) * KVMemory.token_bytes(1, kv_heads, dim, DTYPE)
    layers = max(3, min(64, (1 << 31) // size))
    page, per_row = 16, max(longest, context) // 16 + 1
    memory = KVMemory(layers, rows * per_row * page, kv_heads, dim, DTYPE, DEVICE)
    memory.data.normal_()
    tables = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    starts = np.full(rows, context - 1, np.int64)
    starts[0] = longest - 1
    batch = KVBatch(np.ones(rows, np.int64), starts, tables, page)
    line: dict[str, Any] = {"heads": f"{heads}/{kv_heads}", "rows": rows, "context": context, "longest": longest}
    ways: dict[str, Callable[[Layers, Any, int], Tensor]] = {"fused": Layers.fused, "two": Layers.two}
    for name, run in ways.items():
        steps = Layers(backend, memory, rows, heads, normed=True)

        def all_layers(plan: Any, steps: Layers = steps, run: Callable[..., Tensor] = run) -> Tensor:
            return [run(steps, plan, layer) for layer in range(layers)][-1]

        graph, _ = capture(lambda: steps.plan(batch), all_layers)  # noqa: B023
        line[f"{name}_us"] = seconds(graph.replay, 20) / layers * 1e6
        host = []
        for _ in range(40):
            begin = time.perf_counter()
            steps.plan(batch)
            host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        line[f"{name}_plan_us"] = sorted(host)[20] * 1e6
    line["floor_us"] = size / bandwidth * 1e6
    line["gain"] = line["two_us"] / line["fused_us"]
    return line


def time_launches(
    backend: FlashInferAttention, bandwidth: float, shape: tuple[int, int, int], steps: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """*steps*: rows and context of each."""
    found, default = [], cuda_attention._launch
    for launch in WIDE_LAUNCHES if shape[2] == 256 else LAUNCHES:
        cuda_attention._launch = lambda size, launch=launch: launch  # type: ignore[misc]
        line: dict[str, Any] = {"heads": f"{shape[0]}/{shape[1]}", "block": launch[0], "warps": launch[1]}
        line["stages"] = launch[2]
        for rows, context in steps:
            try:
                spent = time_line(backend, bandwidth, shape, rows, context)["fused_us"]
            except Exception as error:  # more registers or shared memory than there is
                torch.cuda.synchronize()
                spent = type(error).__name__
            line[f"{rows}x{context}"] = spent
        found.append(line)
    cuda_attention._launch = default
    return found


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--sweep", action="store_true", help="also other blocks, warps and stages")
    parser.add_argument("--shape", help="query heads/key heads/head size, of one of the ways that are checked")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--longest", type=int, default=0, help="context of one row among the others")
    arguments = parser.parse_args()
    contexts, rows = (tuple(map(int, each.split(","))) for each in (arguments.contexts, arguments.rows))
    shape = tuple(map(int, arguments.shape.split("/"))) if arguments.shape else None
    if shape is not None and shape not in {way[:3] for way in WAYS}:
        parser.error("--shape is one of " + ", ".join("/".join(map(str, way[:3])) for way in WAYS))
    shapes = SHAPES if shape is None else (shape,)
    if not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    began, facts = time.perf_counter(), environment(("torch", "flashinfer-python", "triton"))
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = FlashInferAttention()
    triton_decode.ROWS = triton_decode.WIDE_ROWS = max(*rows, 16)
    checks = check_replays(backend, shape)
    wrong = [line for line in checks if line["error"] > 1]
    print(f"{len(checks)} checks in {time.perf_counter() - began:.1f} s, {len(wrong)} wrong; "
          f"worst error {max(line['error'] for line in checks):.2f} of the tolerance")  # fmt: skip
    show("WRONG", wrong) if wrong else None
    results: dict[str, Any] = {"checks": checks}
    if not arguments.check:
        bandwidth = copy_bandwidth()
        print(f"copy {bandwidth / 1e12:.2f} TB/s")
        results["copy_bytes_per_s"] = bandwidth
        lines = [
            time_line(backend, bandwidth, each, count, context, arguments.longest)
            for each, context, count in itertools.product(shapes, contexts, rows)
        ]
        results["decode"] = lines
        show("norm, rotation, storing and attention: one kernel, and two", lines)
        if arguments.sweep:
            swept = SWEPT if shape is None else [*itertools.product(rows, contexts)]
            results["launches"] = [
                line for each in shapes[-2:] for line in time_launches(backend, bandwidth, each, swept)
            ]
            show("launches", results["launches"])
    results["seconds"] = time.perf_counter() - began
    if arguments.out is not None:
        content = {"name": "gpu_decode_attention", "environment": facts, "results": results}
        arguments.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\n{results['seconds']:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
