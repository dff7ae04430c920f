"""Gated delta nets on a GPU: the Triton kernels beside plain torch and, if it is installed, flash-linear-attention.

First outputs and states of captured steps, replayed with other rows in other places, are compared with the recurrence
in float32, token by token. Then a layer's time is measured in CUDA graphs over layers with states of their own:
decoding beside the time in which the states could be copied, prompts, and prompts among rows that decode. About three
minutes. ``sweep`` tries other ways to divide a decoding step's matrices, in half of one.

    python benchmarks/gpu_delta_rule.py --out gpu_delta_rule.json
    python benchmarks/gpu_delta_rule.py --parts check        # no timings
    python benchmarks/gpu_delta_rule.py --parts sweep --out gpu_delta_sweep.json
    python benchmarks/gpu_delta_rule.py --parts scan         # how a prompt's chunks are scanned, otherwise
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import environment
from gpu.report import write
from gpu_attention import copy_bandwidth, seconds, show
from torch import Tensor

from mstar.nn.ops import cuda_delta, cuda_delta_chunks, cuda_delta_step, delta_reference
from mstar.nn.ops.cuda_delta_step import Way
from mstar.nn.ops.delta import CHUNK, GatedNorm, Spans, StateSlots

__all__ = ["main"]

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HEADS = {"0.8B": (16, 16), "4B": (16, 32), "27B": (16, 48)}
"""Heads of keys and of values of Qwen3.5's sizes; matrices are 128 × 128."""
SIZE, WIDTH, LAYERS = 128, 4, 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPTS = (256, 1024, 4096, 16384)
MIXED = ((1, 512), (32, 512), (64, 2048))
"""Rows that decode, tokens of a prompt beside them."""
PARTS = ("check", "decode", "prompts")
SWEPT = (1, 8, 32, 64, 128)
"""Rows that are swept, with 16 heads of keys and 32 of values (4B and 9B) in as many layers as these have."""
SWEPT_LAYERS = 24
WAYS = (
    Way(4),
    Way(4, groups=4),
    Way(4, groups=4, registers=168),
    Way(4, resident=1, stages=3),
    Way(4, groups=4, resident=1, stages=3),
    Way(4, resident=2, stages=2),
    Way(4, groups=4, resident=2, stages=2),
)
SCANS = ((32, 4), (32, 8), (16, 4), (64, 8))
"""Columns and warps of a program that scans chunks."""
SCANNED = (512, 2048, 8192)
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 3e-2}
"""Largest error, of the largest value. Factors of the products within chunks are rounded to the dtype."""


@dataclass
class Layers:
    """Layers of one shape with states for so many rows, and what a projection gives for *tokens* tokens."""

    k_heads: int
    v_heads: int
    rows: int
    tokens: int
    layers: int = LAYERS
    dtype: torch.dtype = DTYPE
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        channels = 2 * self.k_heads * SIZE + self.v_heads * SIZE
        make: Any = {"device": DEVICE, "dtype": self.dtype}
        inner = self.v_heads * SIZE
        self.fused = torch.randn(self.tokens, channels + inner + 2 * self.v_heads, **make)
        self.mixed, z, self.a, self.b = self.fused.split((channels, inner, self.v_heads, self.v_heads), 1)
        self.norm = GatedNorm(z.unflatten(1, (-1, SIZE)), torch.rand(SIZE, **make) + 0.5, 1e-6)
        self.weight = torch.randn(channels, WIDTH, **make) / 2
        self.a_log, self.dt_bias = torch.rand(self.v_heads, device=DEVICE) * 2, torch.randn(self.v_heads, **make)
        places = 2 * self.rows + 2
        self.windows = torch.randn(places, self.layers, channels, WIDTH - 1, **make)
        matrices = (places, self.layers, self.v_heads, SIZE, SIZE)
        self.states = (torch.randn(matrices, device=DEVICE) / 8).to(self.state_dtype)
        order = torch.randperm(places, device=DEVICE)
        self.source, self.target = order[: self.rows].clone(), order[self.rows : 2 * self.rows].clone()

    def shuffle(self) -> None:
        """Other tokens, other places."""
        self.fused.normal_()
        order = torch.randperm(2 * self.rows + 2, device=DEVICE)
        self.source.copy_(order[: self.rows])
        self.target.copy_(order[self.rows : 2 * self.rows])

    def run(self, ops: ModuleType, layer: int, spans: Spans, pools: tuple[Tensor, Tensor] | None = None) -> Tensor:
        windows, states = pools or (self.windows, self.states)
        slots = [StateSlots(pool[:, layer], self.source, self.target) for pool in (windows, states)]
        out: Tensor = ops.gated_delta_net(
            self.mixed, self.a, self.b, self.weight, self.a_log, self.dt_bias, spans, *slots, self.norm
        )
        return out

    def step(self, way: Way, layer: int, spans: Spans) -> Tensor:
        """A decoding step by *way*."""
        slots = [StateSlots(pool[:, layer], self.source, self.target) for pool in (self.windows, self.states)]
        out = self.mixed.new_empty((self.rows, self.v_heads, SIZE))
        inputs = (self.mixed, self.a, self.b, self.weight, self.a_log, self.dt_bias)
        cuda_delta_step.step(*inputs, spans, *slots, self.norm, out, way)
        return out

    @property
    def step_bytes(self) -> int:
        """What a decoding step of one layer must read and write: states, windows, inputs, outputs."""
        state = 2 * self.states[0, 0].nbytes + 2 * self.windows[0, 0].nbytes
        return self.rows * state + self.fused.nbytes + self.tokens * self.v_heads * SIZE * self.fused.element_size()


def spans_of(lengths: Sequence[int]) -> Spans:
    return Spans(torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE), sum(lengths))


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


# --- correctness ------------------------------------------------------------------------------------------------------
def exact(layers: Layers, layer: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Outputs and states by the recurrence, a token after the other, float32 throughout."""
    state = layers.states[:, layer].float()[layers.source]
    window = layers.windows[:, layer].float()[layers.source]
    g, beta = delta_reference.gates(layers.a.float(), layers.b, layers.a_log, layers.dt_bias.float())
    keys, group = layers.k_heads * SIZE, layers.v_heads // layers.k_heads
    outs = []
    for row, (first, length) in enumerate(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)):
        s = state[row]
        x = torch.cat((window[row].T, layers.mixed[first : first + length].float()))
        for t in range(length):
            y = (x[t : t + WIDTH] * layers.weight.float().T).sum(0)
            y = torch.nn.functional.silu(y).to(layers.dtype).float()
            q, k, v = y[:keys].view(-1, SIZE), y[keys : 2 * keys].view(-1, SIZE), y[2 * keys :].view(-1, SIZE)
            q, k = (delta_reference.unit(each).repeat_interleave(group, 0) for each in (q, k))
            s = s * g[first + t].exp()[:, None, None]
            held = (s * k[:, :, None]).sum(1)
            s = s + k[:, :, None] * ((v - held) * beta[first + t].float()[:, None])[:, None]
            outs.append((s * q[:, :, None]).sum(1) * SIZE**-0.5)
        state[row] = s
    norm = layers.norm._replace(gate=layers.norm.gate.float(), weight=layers.norm.weight.float())
    return delta_reference.gated_rms_norm(torch.stack(outs), *norm), state


def check() -> list[dict[str, Any]]:
    found = []
    rows_of = ([1] * 5, [200], [1, 1, 130, 64, 1, 3])
    for (k_heads, v_heads), lengths, dtype in itertools.product(((2, 4), (16, 32)), rows_of, LIMITS):
        layers = Layers(k_heads, v_heads, len(lengths), sum(lengths), layers=2, dtype=dtype)
        spans, out = spans_of(lengths), {}
        graph = captured(lambda: out.update(y=layers.run(cuda_delta, 1, spans)))  # noqa: B023
        error = 0.0
        for _ in range(3):
            layers.shuffle()
            wanted, state = exact(layers, 1, lengths)
            graph.replay()
            torch.cuda.synchronize()
            got = layers.states[:, 1][layers.target]
            for mine, other in ((out["y"].float(), wanted), (got, state)):
                error = max(error, float((mine - other).abs().max() / other.abs().max()))
        line = {"heads": f"{k_heads}/{v_heads}", "rows": len(lengths), "tokens": sum(lengths), "dtype": str(dtype)[6:]}
        found.append({**line, "error": error, "right": error <= LIMITS[dtype]})
    return found


# --- time -------------------------------------------------------------------------------------------------------------
def layer_seconds(layers: Layers, ops: ModuleType, spans: Spans) -> float:
    """Of one layer, in a graph of all of them."""

    def run() -> None:
        for layer in range(layers.layers):
            layers.run(ops, layer, spans)

    if ops is delta_reference and not spans.single:  # asks the device for the rows' lengths
        return seconds(run) / layers.layers
    return seconds(captured(run).replay) / layers.layers


def time_decode(bandwidth: float) -> list[dict[str, Any]]:
    lines = []
    for (name, heads), rows, state in itertools.product(HEADS.items(), ROWS, (torch.float32, torch.bfloat16)):
        layers = Layers(*heads, rows, rows, state_dtype=state)
        spans = spans_of([1] * rows)
        ours, floor = layer_seconds(layers, cuda_delta, spans), layers.step_bytes / bandwidth
        line = {"model": name, "rows": rows, "state": str(state)[6:], "us": ours * 1e6, "of copying": floor / ours}
        if state is torch.float32:
            line["torch us"] = layer_seconds(layers, delta_reference, spans) * 1e6
            if (library := library_decode(layers)) is not None:
                line["fla us"] = library * 1e6
        lines.append(line)
    return lines


def time_prompts() -> list[dict[str, Any]]:
    lines = []
    for name, heads in HEADS.items():
        lines += [prompt_line(name, heads, [tokens]) for tokens in PROMPTS]
        lines += [prompt_line(name, heads, [*[1] * rows, tokens]) for rows, tokens in MIXED]
    return lines


def prompt_line(name: str, heads: tuple[int, int], lengths: list[int]) -> dict[str, Any]:
    layers = Layers(*heads, len(lengths), sum(lengths), layers=2)
    spans = spans_of(lengths)
    _ = spans.chunks, spans.first_chunks, spans.row_of  # once a step
    line: dict[str, Any] = {"model": name, "rows": len(lengths), "tokens": sum(lengths)}
    line["us"] = layer_seconds(layers, cuda_delta, spans) * 1e6
    line |= {f"{part} us": each * 1e6 for part, each in parts(layers, spans).items()}
    line["torch us"] = layer_seconds(layers, delta_reference, spans) * 1e6
    if (library := library_prompt(layers, lengths)) is not None:
        line["fla rule us"] = library * 1e6
    return line


def split(layers: Layers, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = layers.k_heads * SIZE
    q, k, v = mixed.split((keys, keys, layers.v_heads * SIZE), 1)
    return q.unflatten(1, (-1, SIZE)), k.unflatten(1, (-1, SIZE)), v.unflatten(1, (-1, SIZE))  # type: ignore[no-untyped-call]


def parts(layers: Layers, spans: Spans) -> dict[str, float]:
    window = StateSlots(layers.windows[:, 0], layers.source, layers.target)
    state = StateSlots(layers.states[:, 0], layers.source, layers.target)
    conv = captured(lambda: cuda_delta.causal_conv(layers.mixed, layers.weight, None, spans, window))
    q, k, v = split(layers, cuda_delta.causal_conv(layers.mixed, layers.weight, None, spans, window))
    gates = (layers.a, layers.b, layers.a_log, layers.dt_bias)
    rule = captured(lambda: cuda_delta_chunks.rule(q, k, v, *gates, spans, state))
    return {"conv": seconds(conv.replay), "rule": seconds(rule.replay)}


# --- ways of a decoding step ------------------------------------------------------------------------------------------
def try_way(way: Way) -> tuple[float, str]:
    """In a process of its own, so that Triton's folder has the kernel: the largest error, and why it failed."""
    try:
        layers = Layers(*HEADS["4B"], 3, 3, layers=SWEPT_LAYERS)
        wanted, state = exact(layers, 1, [1] * 3)
        got = layers.step(way, 1, spans_of([1] * 3))
        pairs = ((got.float(), wanted), (layers.states[:, 1][layers.target], state))
        return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs), ""
    except Exception as error:  # more shared memory than there is, say: that way is out
        return float("inf"), f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def sweep(bandwidth: float) -> list[dict[str, Any]]:
    """Microseconds of a layer by rows, and what copying takes."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), multiprocessing.get_context("spawn")) as pool:
        tried = dict(zip(WAYS, pool.map(try_way, WAYS), strict=True))
    lines: dict[Way, dict[str, Any]] = {
        way: {**way._asdict(), "error": error, "fault": fault, "right": error <= LIMITS[DTYPE]}
        for way, (error, fault) in tried.items()
    }
    copied: dict[str, Any] = {"warps": "copying", "right": True}
    for rows in SWEPT:
        layers, spans = Layers(*HEADS["4B"], rows, rows, layers=SWEPT_LAYERS), spans_of([1] * rows)
        copied[str(rows)] = layers.step_bytes / bandwidth * 1e6
        for way, line in lines.items():
            if line["right"]:
                line[str(rows)] = way_seconds(way, layers, spans) * 1e6
    return [copied, *lines.values()]


def way_seconds(way: Way, layers: Layers, spans: Spans) -> float:
    graph = captured(lambda: [layers.step(way, number, spans) for number in range(layers.layers)])
    return seconds(graph.replay, 20) / layers.layers


# --- ways of a prompt's scan ------------------------------------------------------------------------------------------
def scan() -> list[dict[str, Any]]:
    """Microseconds of a layer's rule by tokens, the 4B model's heads; right if the outputs are those of plain torch."""
    found, default = [], (cuda_delta_chunks._COLUMNS, cuda_delta_chunks._SCANNING)
    for columns, warps in SCANS:
        cuda_delta_chunks._COLUMNS, cuda_delta_chunks._SCANNING = columns, warps
        line: dict[str, Any] = {"columns": columns, "warps": warps}
        try:
            line |= scan_line()
        except Exception as error:  # more registers or shared memory than there is
            line |= {"fault": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        found.append(line)
    cuda_delta_chunks._COLUMNS, cuda_delta_chunks._SCANNING = default
    return found


def scan_line() -> dict[str, Any]:
    line: dict[str, Any] = {}
    for tokens in SCANNED:
        layers, spans = Layers(*HEADS["4B"], 1, tokens, layers=1), spans_of([tokens])
        state = StateSlots(layers.states[:, 0], layers.source, layers.target)
        exact_state = state._replace(pool=state.pool.clone())
        q, k, v = split(layers, layers.mixed)
        g, beta = delta_reference.gates(layers.a, layers.b, layers.a_log, layers.dt_bias)
        run = captured(lambda: line.update(out=cuda_delta_chunks.rule(q, k, v, g, beta, None, None, spans, state)))  # noqa: B023
        line[str(tokens)] = seconds(run.replay) * 1e6
        if tokens == SCANNED[0]:
            wide = (each.float() for each in (q, k, v, g, beta))
            wanted = delta_reference.gated_delta_rule(*wide, spans, exact_state)
            pairs = ((line["out"].float(), wanted), (state.pool[state.target], exact_state.pool[state.target]))
            line["error"] = max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)
            line["right"] = line["error"] <= 2 * LIMITS[DTYPE]  # without the norm, which makes outputs alike
        del line["out"]
    return line


# --- another library --------------------------------------------------------------------------------------------------
def _library() -> Any:
    try:
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    return gated_delta_rule


def library_decode(layers: Layers) -> float | None:
    """flash-linear-attention's recurrence, of states that were gathered and are put back."""
    fla = _library()
    if fla is None:
        return None
    q, k, v = (each[:, None] for each in split(layers, layers.mixed))
    g, beta = delta_reference.gates(layers.a, layers.b, layers.a_log, layers.dt_bias)

    def run() -> None:
        for layer in range(layers.layers):
            pool = layers.states[:, layer]
            _, last = fla.fused_recurrent_gated_delta_rule(
                q, k, v, g=g[:, None], beta=beta[:, None], initial_state=pool.index_select(0, layers.source),
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            pool.index_copy_(0, layers.target, last)

    return seconds(captured(run).replay) / layers.layers


def library_prompt(layers: Layers, lengths: Sequence[int]) -> float | None:
    """The rule alone: chunks, without convolution, gates and the states' way."""
    fla = _library()
    if fla is None:
        return None
    group = layers.v_heads // layers.k_heads
    q, k, v = split(layers, layers.mixed)
    q, k = (each.repeat_interleave(group, 1)[None].contiguous() for each in (q, k))
    g, beta = delta_reference.gates(layers.a, layers.b, layers.a_log, layers.dt_bias)
    state, ends = layers.states[:, 0][layers.source], torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    v = v[None].contiguous()
    return seconds(
        lambda: fla.chunk_gated_delta_rule(
            q, k, v, g=g[None], beta=beta[None], initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=ends,
        )
    )  # fmt: skip


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join((*PARTS, "sweep", "scan")))
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    began, facts = time.perf_counter(), environment(("torch", "triton", "flash-linear-attention"))
    results: dict[str, Any] = {"environment": facts, "chunk": CHUNK}

    def done(part: str, title: str, lines: list[dict[str, Any]]) -> None:
        """What is measured is kept, whatever becomes of the next part."""
        results[part], results["seconds"] = lines, time.perf_counter() - began
        show(title, lines)
        if arguments.out is not None:
            write(arguments.out, results)

    if "check" in chosen:
        done("check", "against the recurrence in float32", check())
    wrong = [line for line in results.get("check", ()) if not line["right"]]
    if not wrong and chosen != ["check"]:
        bandwidth = results["copy_bandwidth"] = copy_bandwidth()
        print(f"copying: {bandwidth / 1e12:.2f} TB/s")
        if "sweep" in chosen:
            done("sweep", "a layer of a decoding step, us by rows", sweep(bandwidth))
            wrong += [line for line in results["sweep"] if not line["right"]]
        if "scan" in chosen:
            done("scan", "the rule of a prompt, us by tokens", scan())
            wrong += [line for line in results["scan"] if not line.get("right")]
        if "decode" in chosen:
            done("decode", "decoding, a layer", time_decode(bandwidth))
        if "prompts" in chosen:
            done("prompts", "prompts, a layer", time_prompts())
    print(f"{len(wrong)} wrong; {results['seconds']:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
