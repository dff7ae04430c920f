"""Linear layers for few rows on a GPU, with what they take in: are they right, and how near the copy bandwidth?

A chain of decoder layers without attention, each with weights of its own, so that no cache holds them, runs in one CUDA
graph: as four plain products a layer (``cublas``), as the operations without the kernels of
``mstar.nn.ops.cuda_linear`` (``apart``), with them (``fused``), and with programmatic dependent launch (``early``).
``share`` is the time to read the weights at the copy bandwidth of the same run over the time taken. Results are
compared with float32, and ``early`` and every replay with ``fused`` bit for bit.

``--sweep`` first measures ways to cut each layer, for every class of rows, and prints the best as lines for
``cuda_linear_table.TUNED``; the chain then uses them. A minute and a half for 2 to 16 rows of all shapes, and as
much for one row::

    python benchmarks/gpu_linear.py --sweep --rows 2,4,8,16 --shapes all --chain qwen3.5-4b --out FEW.json
    python benchmarks/gpu_linear.py --sweep --rows 1 --shapes all --chain qwen3.5-4b --out ONE.json

Needs a CUDA machine; ``--check`` also runs in Triton's interpreter (``TRITON_INTERPRET=1 … --check --device cpu --dtype
float16 --shapes tiny``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, table
from gpu_ops import SHAPES, Shape, copy_bandwidth
from torch import Tensor

from mstar.nn.ops import cuda, cuda_linear, pdl
from mstar.nn.ops.cuda_linear_table import CLASSES, TUNED, Cut, Key, candidates, config, row_class

LAYERS = 8
REPLAYS = 10
SAME = 200  # replays whose results are compared bit for bit
EPS = 1e-5
LARGER_THAN_CACHES = 256 << 20
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Features of a layer's products. *qkv*: of whatever comes before the mixing. *inner*: what comes out of it."""

    hidden: int
    qkv: int
    inner: int
    intermediate: int
    vocab: int


def sizes_of(shape: Shape) -> Sizes:
    inner = shape.q_heads * shape.head_dim
    qkv = inner + 2 * shape.kv_heads * shape.head_dim
    return Sizes(shape.hidden, qkv, inner, shape.intermediate, shape.vocab)


ALL_SHAPES = {
    **{name: sizes_of(shape) for name, shape in SHAPES.items() if name != "tiny"},
    "qwen3.5-4b": Sizes(2560, 12_352, 4096, 9216, 248_320),  # layers with a state
    "qwen3.5-4b-attention": Sizes(2560, 10_240, 4096, 9216, 248_320),
    "qwen3.5-9b": Sizes(4096, 12_352, 4096, 12_288, 248_320),
    "qwen3.5-9b-attention": Sizes(4096, 10_240, 4096, 12_288, 248_320),
    "tiny": Sizes(128, 256, 128, 160, 700),
}
PRODUCTS = ("qkv", "o", "gate_up", "down", "head")


@dataclass
class Layer:
    """A layer but its attention: weights ``[N, K]`` and norms."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (self.qkv, self.o, self.gate_up, self.down))

    def wide(self) -> Layer:
        weights = (each.float() for each in (self.qkv, self.o, self.gate_up, self.down))
        return Layer(*weights, (self.norms[0].float(), self.norms[1].float()))


def draw(*size: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, device=device) * scale).to(dtype)


def weight(n: int, k: int, dtype: torch.dtype, device: str) -> Tensor:
    return draw(n, k, dtype=dtype, device=device, scale=k**-0.5)


def layers_of(shape: Sizes, count: int, dtype: torch.dtype, device: str) -> list[Layer]:
    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(shape.hidden, device=device)).to(dtype)

    return [
        Layer(
            weight(shape.qkv, shape.hidden, dtype, device),
            weight(shape.hidden, shape.inner, dtype, device),
            weight(2 * shape.intermediate, shape.hidden, dtype, device),
            weight(shape.hidden, shape.intermediate, dtype, device),
            (norm(), norm()),
        )
        for _ in range(count)
    ]


# --- the chain --------------------------------------------------------------------------------------------------------
def cublas(layers: list[Layer], stream: Tensor) -> Tensor:
    """The products alone, of fixed inputs."""
    rows = stream.shape[0]
    inner, wide = stream.new_zeros(rows, layers[0].o.shape[1]), stream.new_zeros(rows, layers[0].down.shape[1])
    for layer in layers:
        F.linear(stream, layer.qkv)
        F.linear(inner, layer.o)
        F.linear(stream, layer.gate_up)
        out = F.linear(wide, layer.down)
    return out


def apart(layers: list[Layer], stream: Tensor) -> Tensor:
    """The operations one by one."""
    x, delta = stream.clone(), None
    for layer in layers:
        heads = F.linear(cuda.add_rms_norm(x, delta, layer.norms[0], EPS), layer.qkv)
        delta = F.linear(heads[:, : layer.o.shape[1]], layer.o)
        gate_up = F.linear(cuda.add_rms_norm(x, delta, layer.norms[1], EPS), layer.gate_up)
        delta = F.linear(cuda.silu_mul(gate_up), layer.down)
    return x if delta is None else x.add_(delta)


def fused(layers: list[Layer], stream: Tensor) -> Tensor:
    """As ``mstar.nn.decoder`` runs them: what the kernels do not take runs apart."""
    x, delta = stream.clone(), None
    for layer in layers:
        out = cuda_linear.norm_linear(x, layer.norms[0], EPS, layer.qkv, None) if delta is None else None
        if out is None:
            out = _linear(cuda.add_rms_norm(x, delta, layer.norms[0], EPS), layer.qkv)
        delta = _add(x, out[:, : layer.o.shape[1]], layer.o)
        out = cuda_linear.norm_gate_up(x, layer.norms[1], EPS, layer.gate_up, None) if delta is None else None
        if out is None:
            out = cuda.silu_mul(_linear(cuda.add_rms_norm(x, delta, layer.norms[1], EPS), layer.gate_up))
        delta = _add(x, out, layer.down)
    return x if delta is None else x.add_(delta)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    out = cuda_linear.linear(x, weight, None)
    return F.linear(x, weight) if out is None else out


def _add(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    return None if cuda_linear.add_linear(residual, x, weight, None) else _linear(x, weight)


def exact(layers: list[Layer], stream: Tensor) -> Tensor:
    """In float32, from the same weights."""
    x = stream.float()
    for layer in layers:
        wide = layer.wide()
        out = F.linear(F.rms_norm(x, x.shape[1:], wide.norms[0], EPS), wide.qkv)
        x = x + F.linear(out[:, : wide.o.shape[1]], wide.o)
        gate, up = F.linear(F.rms_norm(x, x.shape[1:], wide.norms[1], EPS), wide.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, wide.down)
    return x


WAYS = (("cublas", cublas, False), ("apart", apart, False), ("fused", fused, False), ("early", fused, True))


# --- one kind of layer ------------------------------------------------------------------------------------------------
@dataclass
class Product:
    """One product with what it takes in: *ours* with the cut that the table holds, *apart* without, *exact*."""

    name: str
    n: int
    k: int
    takes: str  # "norm", "gate" (norm and activation) or "add"

    def key(self, rows: int) -> Key:
        return Key(self.n, self.k, self.takes == "gate", rows)

    def ours(self, x: Tensor, w: Tensor, norm: Tensor, stream: Tensor) -> Tensor | None:
        if self.takes == "add":
            return stream if cuda_linear.add_linear(stream, x, w, None) else None
        call = cuda_linear.norm_gate_up if self.takes == "gate" else cuda_linear.norm_linear
        return call(x, norm, EPS, w, None)

    def apart(self, x: Tensor, w: Tensor, norm: Tensor, stream: Tensor) -> Tensor:
        if self.takes == "add":  # the sum is taken in by the next norm
            return F.linear(x, w)
        out = F.linear(cuda.add_rms_norm(x, None, norm, EPS), w)
        return cuda.silu_mul(out) if self.takes == "gate" else out

    def exact(self, x: Tensor, w: Tensor, norm: Tensor, stream: Tensor) -> Tensor:
        if self.takes == "add":
            return stream.float() + F.linear(x.float(), w.float())
        out = F.linear(F.rms_norm(x.float(), norm.shape, norm.float(), EPS), w.float())
        if self.takes == "norm":
            return out
        gate, up = out.chunk(2, -1)
        return F.silu(gate) * up

    def inputs(self, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        def made(*size: int) -> Tensor:
            return draw(*size, dtype=dtype, device=device)

        return made(rows, self.k), made(self.k), made(rows, self.n)


def products(shape: Sizes) -> list[Product]:
    return [
        Product("qkv", shape.qkv, shape.hidden, "norm"),
        Product("o", shape.hidden, shape.inner, "add"),
        Product("gate_up", 2 * shape.intermediate, shape.hidden, "gate"),
        Product("down", shape.hidden, shape.intermediate, "add"),
        Product("head", shape.vocab, shape.hidden, "norm"),
    ]


def use(key: Key, cut: Cut | None) -> None:
    TUNED[key] = cut
    config.cache_clear()


# --- measuring --------------------------------------------------------------------------------------------------------
def apart_by(got: Tensor, want: Tensor) -> float:
    """RMS of the difference over RMS of the values."""
    return ((got.float() - want).square().mean() / want.square().mean()).sqrt().item()


def captured(run: Run) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Without ``torch.cuda.graph``, which collects garbage first: longer than most of these graphs take."""
    side, graph = _side(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        side.synchronize()
        graph.capture_begin()
        try:
            out = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph, out


@cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return min(times)


def measure(
    shape: str, rows: int, layers: list[Layer], bandwidth: float | None, which: list[str]
) -> Iterator[dict[str, Any]]:
    """One result for each way."""
    stream = draw(rows, layers[0].qkv.shape[1], dtype=layers[0].qkv.dtype, device=layers[0].qkv.device.type)
    want = exact(layers, stream)
    usual = apart_by(apart(layers, stream), want)
    ways = [way for way in WAYS if way[0] in which and (bandwidth is not None or way[0] != "early")]
    floor = None if bandwidth is None else sum(layer.nbytes for layer in layers) / bandwidth * 1e6
    before: Tensor | None = None
    for name, way, early in ways:
        result: dict[str, Any] = {"shape": shape, "rows": rows, "way": name, "right": True}
        pdl.use(early)
        if bandwidth is None or floor is None:
            out = way(layers, stream)
        else:
            graph, out = captured(lambda way=way: way(layers, stream))  # type: ignore[misc]
            taken = microseconds(graph)
            result |= {"us_per_layer": taken / len(layers), "share": floor / taken}
            if name in ("fused", "early"):
                result["same"] = result["right"] = same_always(graph, out, before if early else None)
        if name != "cublas":
            result["error"] = apart_by(out, want)
            result["right"] = result["right"] and result["error"] <= 1.5 * usual + 1e-6
        before = out.clone() if name == "fused" else before
        pdl.use(False)
        yield result


def same_always(graph: torch.cuda.CUDAGraph, out: Tensor, before: Tensor | None) -> bool:
    """Whether every replay, one after another without a pause, ends with *before* or the first one's result."""
    before = out.clone() if before is None else before
    wrong = torch.zeros((), dtype=torch.int64, device=out.device)
    for _ in range(SAME):
        graph.replay()
        wrong += (out != before).any()
    return not wrong.item()


# --- sweep ------------------------------------------------------------------------------------------------------------
def compile_one(job: tuple[Product, int, Cut, bool]) -> str | None:
    """In a process of its own: what is compiled lies in Triton's folder afterwards. Returns why it failed."""
    product, rows, cut, early = job
    pdl.use(early)
    use(product.key(rows), cut)
    x, norm, stream = product.inputs(rows, torch.bfloat16, "cuda")
    try:
        product.ours(x, torch.zeros(product.n, product.k, dtype=torch.bfloat16, device="cuda"), norm, stream)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: that cut is out
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def sweep(
    shapes: list[str], which: list[str], classes: list[int], early: bool, bandwidth: float
) -> list[dict[str, Any]]:
    known: dict[tuple[int, int, str], Product] = {}
    for name in shapes:
        for product in products(ALL_SHAPES[name]):
            if product.name in which:
                known.setdefault((product.n, product.k, product.takes), product)
    jobs = [(p, rows, cut, early) for p in known.values() for rows in classes for cut in candidates(p.key(rows))]
    # One job for what compiles to the same kernel: classes up to 8 rows share theirs.
    once = {(id(p), rows if rows == 1 else max(rows, 8), cut): (p, rows, cut, early) for p, rows, cut, _ in jobs}
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), multiprocessing.get_context("spawn")) as pool:
        faults = dict(zip(once, pool.map(compile_one, once.values(), chunksize=4), strict=True))
    pdl.use(early)
    found = []
    for product in known.values():
        count = max(2, -(-LARGER_THAN_CACHES // (product.n * product.k * 2)))
        weights = [weight(product.n, product.k, torch.bfloat16, "cuda") for _ in range(count)]
        for rows in classes:
            works = [
                cut for cut in candidates(product.key(rows))
                if faults[id(product), rows if rows == 1 else max(rows, 8), cut] is None
            ]  # fmt: skip
            found.append(best(product, rows, works, weights, bandwidth))
        del weights
    pdl.use(False)
    out = [f"{job[0].name} {job[2]}: {faults[at]}" for at, job in once.items() if faults[at] is not None]
    if out:
        print("not usable:", *out, sep="\n  ")
    return found


def _written(cut: Cut) -> str:
    *sizes, narrow = cut
    return f"Cut({', '.join(map(str, sizes))}{', narrow=True' if narrow else ''})"


def best(product: Product, rows: int, cuts: list[Cut], weights: list[Tensor], bandwidth: float) -> dict[str, Any]:
    x, norm, stream = product.inputs(rows, torch.bfloat16, "cuda")
    want = product.exact(x, weights[0], norm, stream)

    def timed(call: Callable[..., Tensor | None]) -> float:
        kept = stream.clone()  # which products are added to

        def run() -> Tensor:
            for each in weights:
                call(x, each, norm, kept)
            return x

        return microseconds(captured(run)[0]) / len(weights)

    key = product.key(rows)
    plain = timed(product.apart)
    times: dict[Cut, float] = {}
    for cut in cuts:
        use(key, cut)
        got = product.ours(x, weights[0], norm, stream.clone())
        if got is None or apart_by(got, want) > 2**-7:
            print(f"WRONG: {product.name} {key} {cut}")
            continue
        times[cut] = timed(product.ours)
    fastest = min(times, key=times.__getitem__, default=None)
    chosen = fastest if fastest is not None and times[fastest] <= plain else None
    use(key, chosen)
    nbytes = weights[0].nbytes
    result: dict[str, Any] = {
        "product": product.name, "key": list(key), "apart_us": plain, "apart_share": nbytes / bandwidth * 1e6 / plain,
        "cuts": [[list(cut), taken] for cut, taken in times.items()],
        "line": f"    Key{tuple(key)}: {None if chosen is None else _written(chosen)},",
    }  # fmt: skip
    if fastest is not None:
        result |= {"best_us": times[fastest], "best_share": nbytes / bandwidth * 1e6 / times[fastest]}
        result["cut"] = str(tuple(fastest))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-3.2-3b,qwen3-0.6b", help=f"of {', '.join(ALL_SHAPES)}; or all")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64", help="batch sizes")
    parser.add_argument("--ways", default=",".join(name for name, *_ in WAYS), help="to run the chain")
    parser.add_argument("--layers", type=int, default=LAYERS, help="with weights of their own")
    parser.add_argument("--sweep", action="store_true", help="look for the best cuts first")
    parser.add_argument("--products", default=",".join(PRODUCTS), help="which the sweep is for")
    parser.add_argument("--chain", help="shapes whose chains are measured: all, unless given")
    parser.add_argument("--early", action="store_true", help="sweep with programmatic dependent launch")
    parser.add_argument("--check", action="store_true", help="compare with float32 only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    known = [name for name in ALL_SHAPES if name != "tiny"]
    seed, names = torch.seed(), known if options.shapes == "all" else options.shapes.split(",")
    sizes = [int(rows) for rows in options.rows.split(",")]
    facts = environment(("torch", "triton"))
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth = None if options.check else copy_bandwidth()
    content: dict[str, Any] = {"environment": facts, "seed": seed, "copy_bytes_per_second": bandwidth}
    with torch.inference_mode():
        if options.sweep and bandwidth is not None:
            classes = [each for each in CLASSES if each in {row_class(rows) for rows in sizes}]
            which = options.products.split(",")
            found = content["sweep"] = sweep(names, which, classes, options.early, bandwidth)
            columns = ("product", "key", "cut", "best_us", "best_share", "apart_us", "apart_share")
            table("Best cuts", [{**each, "key": str(each["key"])} for each in found], columns)
            print(*dict.fromkeys(each["line"] for each in found), sep="\n")
        results = content["results"] = []
        for name in names if options.chain is None else filter(None, options.chain.split(",")):
            layers = layers_of(ALL_SHAPES[name], options.layers, getattr(torch, options.dtype), options.device)
            for rows in sizes:
                results += measure(name, rows, layers, bandwidth, options.ways.split(","))
            del layers
    shown = [{**result, "right": "yes" if result["right"] else "NO"} for result in results]
    table("Layers without attention", shown, ("shape", "rows", "way", "us_per_layer", "share", "error", "right"), 4)
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
