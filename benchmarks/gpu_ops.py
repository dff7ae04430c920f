"""The operations between matrix products on a GPU: are they right, and what does one cost beside the memory it touches?

Each operation of ``mstar.nn.ops`` is compared with the plain torch operations in float32 on fresh random inputs, and
timed inside a CUDA graph of 20 copies, so that launching is part of it and Python is not. ``floor_us`` is the bytes it
has to read and write at the copy bandwidth measured in the same run. Needs a CUDA machine; ``--check`` also runs in
Triton's interpreter (``TRITON_INTERPRET=1 … --check --device cpu --shapes tiny``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import environment, table
from torch import Tensor

from mstar.nn import sampling
from mstar.nn.ops import HeadNorms, cuda, cuda_sampling, reference

COPIES = 20
REPEATS = 10
DTYPE = torch.bfloat16
TOKENS = 1 << 16  # of the KV memory


@dataclass
class Shape:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norms: bool


SHAPES = {
    "llama-3.2-3b": Shape(3072, 24, 8, 128, 8192, 128_256, False),
    "qwen3-0.6b": Shape(1024, 16, 8, 128, 3072, 151_936, True),
    "qwen3-8b": Shape(4096, 32, 8, 128, 12_288, 151_936, True),
    "tiny": Shape(96, 4, 2, 16, 80, 700, True),
}


@dataclass
class Case:
    """*run* does the operation once; *error* compares it with the reference: the largest difference over the largest
    value, or for sampling the share of wrong tokens. *nbytes*: what must be read and written."""

    name: str
    run: Callable[[], Any]
    error: Callable[[], float]
    limit: float
    nbytes: int


def cases(shape: Shape, rows: int, device: str) -> Iterator[Case]:
    yield from _layer_cases(shape, rows, device)
    yield from _sampling_cases(shape, rows, device)


def _layer_cases(shape: Shape, rows: int, device: str) -> Iterator[Case]:
    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.float32).to(DTYPE)

    element = DTYPE.itemsize
    stream, delta, weight = draw(rows, shape.hidden), draw(rows, shape.hidden), draw(shape.hidden)
    kept = stream.clone()
    yield Case(
        "add_rms_norm",
        lambda: cuda.add_rms_norm(kept, delta, weight, 1e-5),
        lambda: _apart(
            cuda.add_rms_norm(stream.clone(), delta, weight, 1e-5),
            reference.add_rms_norm((stream + delta).float(), None, weight.float(), 1e-5),
        ),
        2**-7,
        (4 * rows + 1) * shape.hidden * element,
    )
    bias = draw(shape.hidden)
    yield Case(
        "add_layer_norm",
        lambda: cuda.add_layer_norm(kept, delta, weight, bias, 1e-5),
        lambda: _apart(
            cuda.add_layer_norm(stream.clone(), delta, weight, bias, 1e-5),
            reference.add_layer_norm((stream + delta).float(), None, weight.float(), bias.float(), 1e-5),
        ),
        2**-7,
        (4 * rows + 2) * shape.hidden * element,
    )
    gate_up = draw(rows, 2 * shape.intermediate)
    yield Case(
        "silu_mul",
        lambda: cuda.silu_mul(gate_up),
        lambda: _apart(cuda.silu_mul(gate_up), reference.silu_mul(gate_up.float())),
        2**-7,
        3 * rows * shape.intermediate * element,
    )
    size, half = shape.head_dim, shape.head_dim // 2
    frequencies = 1 / 500_000 ** (torch.arange(half, device=device) / half)
    inverse = torch.cat((-frequencies, frequencies))
    positions = torch.randint(0, 100_000, (rows,), device=device)
    yield Case(
        "rotation",
        lambda: cuda.rotation(positions, inverse, 1.0, DTYPE),
        lambda: max(
            _apart(mine, exact)
            for mine, exact in zip(
                cuda.rotation(positions, inverse, 1.0, DTYPE),
                reference.rotation(positions, inverse, 1.0, torch.float32),
                strict=True,
            )
        ),
        2**-7,
        rows * (8 + 2 * size * element) + 4 * size,
    )
    yield from _cache_cases(shape, rows, device, draw, cuda.rotation(positions, inverse, 1.0, DTYPE))


def _cache_cases(
    shape: Shape, rows: int, device: str, draw: Callable[..., Tensor], rotation: tuple[Tensor, Tensor]
) -> Iterator[Case]:
    size, q_heads, turning = shape.head_dim, shape.q_heads, shape.q_heads + shape.kv_heads
    heads = draw(rows, turning + shape.kv_heads, size)
    norms = HeadNorms(draw(size), draw(size), 1e-6) if shape.norms else None
    tokens = TOKENS if device != "cpu" else rows + 7
    keys, values = (torch.zeros(tokens, shape.kv_heads * size, dtype=DTYPE, device=device) for _ in range(2))
    places = torch.randperm(tokens, device=device)[:rows]

    def rotate_error() -> float:
        wide = None if norms is None else HeadNorms(norms.q.float(), norms.k.float(), norms.eps)
        cos, sin = (each.float() for each in rotation)
        exact = reference.rotate_store(heads.float(), q_heads, cos, sin, wide, None, None, None)
        got = cuda.rotate_store(heads.clone(), q_heads, *rotation, norms, keys, values, places)
        stored = (
            got[0],
            keys[places].view(rows, shape.kv_heads, size),
            values[places].view(rows, shape.kv_heads, size),
        )
        return max(_apart(mine, want) for mine, want in zip((*got, *stored), (*exact, *exact), strict=True))

    def store_error() -> float:
        k, v = heads[:, q_heads:turning], heads[:, turning:]
        cuda.store_rows(keys, values, places, k, v)
        same = torch.equal(keys[places], k.flatten(1)) and torch.equal(values[places], v.flatten(1))
        return 0.0 if same else 1.0

    element, row = DTYPE.itemsize, size * DTYPE.itemsize
    turned = heads.clone()
    yield Case(
        "rotate_store",
        lambda: cuda.rotate_store(turned, q_heads, *rotation, norms, keys, values, places),
        rotate_error,
        2**-7,
        rows * ((2 * q_heads + 5 * shape.kv_heads) * row + size * element + 8),
    )
    yield Case(
        "store_rows",
        lambda: cuda.store_rows(keys, values, places, heads[:, q_heads:turning], heads[:, turning:]),
        store_error,
        0.0,
        rows * (4 * shape.kv_heads * row + 8),
    )


# --- sampling ---------------------------------------------------------------------------------------------------------
PARAMETERS = {  # temperature, top-p, min-p, top-k
    "greedy": (0.0, 1.0, 0.0, 0),
    "temperature": (1.0, 1.0, 0.0, 0),
    "top-p 0.9": (1.0, 0.9, 0.0, 0),
    "top-k 50": (0.7, 1.0, 0.0, 50),
    "top-k 20, top-p 0.95": (0.6, 0.95, 0.0, 20),
    "min-p 0.05": (1.0, 1.0, 0.05, 0),
}


def _sampling_cases(shape: Shape, rows: int, device: str) -> Iterator[Case]:
    scores = (torch.randn(rows, shape.vocab, device=device) * 2).to(DTYPE)
    slots = torch.randperm(rows, device=device)
    for name, (temperature, top_p, min_p, top_k) in PARAMETERS.items():
        greedy = temperature == 0
        floats = torch.tensor([[1.0 if greedy else 1 / temperature, top_p, min_p, 1.0, 0.0, 0.0, float(greedy)]])
        floats, ks = floats.repeat(rows, 1).to(device), torch.full((rows,), top_k, device=device)
        uniforms = torch.rand(rows, dtype=torch.float64, device=device)
        filters = bool(top_k or top_p < 1 or min_p)
        arguments = (scores, slots, floats, ks, uniforms, filters)

        def run(arguments: Any = arguments) -> Tensor:
            return cuda_sampling.sample(*arguments)

        def error(arguments: Any = arguments) -> float:
            return _wrong_tokens(cuda_sampling.sample(*arguments), *arguments)

        yield Case(f"sample, {name}", run, error, 0.0, scores.nbytes)


def _wrong_tokens(
    got: Tensor, scores: Tensor, slots: Tensor, floats: Tensor, top_k: Tensor, uniforms: Tensor, filters: bool
) -> float:
    """Share of rows whose token's interval of the cumulative distribution does not hold the row's number, by more than
    float32's rounding. One row at a time: a float64 table of all would not fit beside a model."""
    wrong = 0
    for row, slot in enumerate(slots.tolist()):
        inverse, top_p, min_p, *_, greedy = floats[slot].tolist()
        work = scores[row : row + 1].float() * inverse
        token = int(got[row])
        if greedy:
            wrong += token != int((work[0] == work.amax()).nonzero()[0])
            continue
        threshold = sampling.min_p_threshold(work.amax(-1), torch.full((1,), min_p, device=work.device))
        if filters:
            p, k = torch.full((1,), top_p, device=work.device), top_k[slot : slot + 1]
            found = sampling.filter_threshold(work.cpu(), k.cpu(), p.cpu(), int(k)).to(work.device)
            threshold = torch.maximum(threshold, found)
        share = (work.double() - work.amax()).exp() * (work >= threshold.unsqueeze(1))
        until = (share.cumsum(-1) / share.sum())[0]
        low = until[token] - share[0, token] / share.sum()
        fits = share[0, token] > 0 and low - 1e-5 <= uniforms[row] <= until[token] + 1e-5
        wrong += not fits
    return wrong / len(slots)


# --- measuring --------------------------------------------------------------------------------------------------------
def _apart(got: Tensor, exact: Tensor) -> float:
    return ((got.float() - exact.float()).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


def microseconds(run: Callable[[], Any]) -> float:
    """One call within a CUDA graph of ``COPIES``: the best of ``REPEATS`` replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            run()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / COPIES)
    return min(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 4 GB."""
    source = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.2-3b,qwen3-0.6b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,64,128", help="batch sizes")
    parser.add_argument("--check", action="store_true", help="compare with the reference only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    seed = torch.seed()
    facts = environment(("torch", "triton"))
    bandwidth = None if options.check else copy_bandwidth()
    results = []
    with torch.inference_mode():
        for name in options.shapes.split(","):
            for rows in map(int, options.rows.split(",")):
                for case in cases(SHAPES[name], rows, options.device):
                    result: dict[str, Any] = {"shape": name, "rows": rows, "op": case.name, "error": case.error()}
                    result["right"] = result["error"] <= case.limit
                    if bandwidth is not None:
                        result |= {"us": microseconds(case.run), "floor_us": case.nbytes / bandwidth * 1e6}
                    results.append(result)
    shown = [{**result, "right": "yes" if result["right"] else "NO"} for result in results]
    table("Operations between products", shown, ("shape", "rows", "op", "error", "right", "us", "floor_us"), 4)
    content = {"environment": facts, "seed": seed, "copy_bytes_per_second": bandwidth, "results": results}
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
