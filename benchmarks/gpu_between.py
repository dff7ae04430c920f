"""What lies between the products of a decoding step on a GPU: norms, activations, sums of divided products.

A chain of layers without attention, each with weights of its own, in one CUDA graph, as ``gpu_linear.py`` has it: plain
(``whole``), with norms and activations that ask for the next weights (``ahead``, by how many megabytes), with products
whose parts the next norm adds up (by the parts of o and of down), with both; and with programmatic dependent launch of
our kernels between cuBLAS's (``early``). A short chain on a cool card: what counts is the step of ``vlm_gpu.py``.

Each is compared with float32, and what divides nothing with *whole* bit for bit. Where a product is faster undivided,
or with other parts, ``mstar.nn.ops.cuda_linear_table.DIVIDED`` is to say so::

    python benchmarks/gpu_between.py --shapes qwen3.5-4b,qwen3.5-9b --rows 8,32,64 --out FILE.json    # a minute
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import environment, table
from gpu_linear import ALL_SHAPES, EPS, LAYERS, Layer, apart_by, captured, draw, exact, layers_of, microseconds
from gpu_ops import copy_bandwidth
from torch import Tensor

from mstar.nn.ops import ahead, cuda, cuda_linear, pdl, whole
from mstar.nn.ops.cuda_linear_table import DIVIDED

PARTS = (2, 3, 4, 6, 8)
MEGABYTES = (2, 3, 4, 6, 8)
Parts = tuple[int, int]
"""Of o and of down; 1: undivided."""


def chain(layers: list[Layer], stream: Tensor, asking: bool) -> Tensor:
    """The layers as ``mstar.nn.decoder`` runs them."""
    x, delta = stream.clone(), None
    for layer in layers:
        qkv, gate_up, down = (layer.qkv, layer.gate_up, layer.down) if asking else (None, None, None)
        heads = F.linear(cuda.add_rms_norm(x, delta, layer.norms[0], EPS, following=qkv), layer.qkv)
        delta = _add(x, heads[:, : layer.o.shape[1]], layer.o)
        wide = F.linear(cuda.add_rms_norm(x, delta, layer.norms[1], EPS, following=gate_up), layer.gate_up)
        delta = _add(x, cuda.silu_mul(wide, down), layer.down)
    return x if delta is None else x.add_(whole(delta, x))


def _add(x: Tensor, mixed: Tensor, weight: Tensor) -> Tensor | None:
    if cuda_linear.add_linear(x, mixed, weight, None):
        return None
    parts = cuda_linear.divided_linear(mixed, weight)
    return F.linear(mixed, weight) if parts is None else parts


def divide(layer: Layer, parts: Parts) -> None:
    for weight, count in zip((layer.o, layer.down), parts, strict=True):
        key = weight.shape[0], weight.shape[1]
        DIVIDED.pop(key, None)
        if count > 1:
            DIVIDED[key] = ((1 << 30, count),)


class Way(NamedTuple):
    """*megabytes* that are asked for (0: none)."""

    name: str
    parts: Parts = (1, 1)
    megabytes: int = 0
    early: bool = False


def ways(layer: Layer) -> Iterator[Way]:
    fitting = [[parts for parts in PARTS if weight.shape[1] % (64 * parts) == 0] for weight in (layer.o, layer.down)]
    yield Way("whole")
    yield Way("early", early=True)
    for parts in fitting[0]:
        yield Way(f"o in {parts}", (parts, 1))
    for parts in fitting[1]:
        yield Way(f"down in {parts}", (1, parts))
    for size in MEGABYTES:
        yield Way(f"ahead {size} MB", megabytes=size)
    for size in (2, 4):
        yield Way(f"both, {size} MB", usual(layer), size)
    yield Way("both, 4 MB, early", usual(layer), 4, early=True)


def usual(layer: Layer) -> Parts:
    """As the table has it."""
    found = (DIVIDED.get((weight.shape[0], weight.shape[1]), ((0, 1),)) for weight in (layer.o, layer.down))
    o, down = (each[0][1] for each in found)
    return o, down


def measure(shape: str, rows: int, layers: list[Layer], bandwidth: float) -> Iterator[dict[str, Any]]:
    stream = draw(rows, layers[0].qkv.shape[1], dtype=torch.bfloat16, device="cuda")
    want, floor = exact(layers, stream), sum(layer.nbytes for layer in layers) / bandwidth * 1e6
    plain: Tensor | None = None
    error = usual_us = 0.0
    for way in list(ways(layers[0])):
        before = dict(DIVIDED), ahead.BYTES
        divide(layers[0], way.parts)
        ahead.BYTES = way.megabytes << 20
        pdl.use(way.early)
        try:
            graph, out = captured(lambda way=way: chain(layers, stream, way.megabytes > 0))  # type: ignore[misc]
            taken = microseconds(graph)
        finally:
            DIVIDED.clear()
            DIVIDED.update(before[0])
            ahead.BYTES = before[1]
            pdl.use(False)
        off = apart_by(out, want)
        if plain is None:
            plain, error, usual_us = out.clone(), off, taken
        same = way.parts != (1, 1) or bool(torch.equal(out, plain))
        yield {
            "shape": shape, "rows": rows, "way": way.name, "us_per_layer": taken / len(layers),
            "of_whole": taken / usual_us, "share": floor / taken, "error": off,
            "right": same and off <= 1.5 * error + 1e-6,
        }  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3.5-4b", help=f"of {', '.join(ALL_SHAPES)}")
    parser.add_argument("--rows", default="8,32,64", help="batch sizes")
    parser.add_argument("--layers", type=int, default=LAYERS, help="with weights of their own")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    facts = environment(("torch", "triton"))
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            layers = layers_of(ALL_SHAPES[shape], options.layers, torch.bfloat16, "cuda")
            for rows in map(int, options.rows.split(",")):
                results += measure(shape, rows, layers, bandwidth)
            del layers
    shown = [{**result, "right": "yes" if result["right"] else "NO"} for result in results]
    table("Between products", shown, ("shape", "rows", "way", "us_per_layer", "of_whole", "share", "error", "right"), 4)
    if options.out is not None:
        content = {"environment": facts, "copy_bytes_per_second": bandwidth, "results": results}
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
