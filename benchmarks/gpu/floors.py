"""What the device allows: copy bandwidth, the rate of a large product, and the linear graph.

The linear graph is a decode step without everything that is not a matrix product: the model's linear layers at their
real sizes, each with weights of its own, in plain ``F.linear``, captured in one CUDA graph and replayed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.child import Job
from gpu.shapes import SHAPES, Shape, sizes_of

__all__ = ["copy_bandwidth", "floors", "gemm_rate", "linear_graph", "products_graph"]


def floors(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    shape, sizes, device = SHAPES[job.shape], sizes_of(job.shape), torch.device(job.device)
    copy = copy_bandwidth(device, sizes.copy_bytes)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "copy_bytes_per_s": copy,
        "gemm_flops_per_s": gemm_rate(device, sizes.gemm),
        "read_bytes": shape.read_bytes,
        "read_s_at_copy": shape.read_bytes / copy,
        "kv_bytes_per_token": shape.kv_bytes,
    }
    found["linear_graph_s"] = linear_graph(shape, device, job.batches or sizes.batches)
    return found


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * nbytes / _time(lambda: target.copy_(source), device)


def gemm_rate(device: torch.device, size: int) -> float:
    """Operations per second of a square product of random bfloat16 matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * float(size) ** 3 / _time(lambda: a @ b, device)


def linear_graph(shape: Shape, device: torch.device, batches: Sequence[int]) -> dict[str, float]:
    """Seconds of one step's linear layers, head included, by batch size."""
    products = [(out, inner) for _, out, inner in shape.layer_products] * shape.facts.layers
    vocab = -(-shape.facts.vocab // 8) * 8  # the sizes that cuBLAS has fast kernels for
    return products_graph([*products, (vocab, shape.facts.hidden)], device, batches)


def products_graph(
    products: Sequence[tuple[int, int]], device: torch.device, batches: Sequence[int]
) -> dict[str, float]:
    """Seconds of *products*, (outputs, inputs) of layers one after the other, by batch size."""
    weights = [_weight(out, inner, device) for out, inner in products]
    return {str(batch): _linear_step(weights, batch, device) for batch in batches}


def _weight(out: int, inner: int, device: torch.device) -> Tensor:
    return torch.empty(out, inner, dtype=torch.bfloat16, device=device).normal_(0, 1 / math.sqrt(inner))


def _linear_step(weights: Sequence[Tensor], batch: int, device: torch.device) -> float:
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], device=device, dtype=torch.bfloat16) for w in weights}

    def step() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    with torch.inference_mode():
        if device.type != "cuda":
            return _time(step, device)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # the library sets itself up outside the capture
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return _time(graph.replay, device, rounds=30)


def _time(call: Callable[[], Any], device: torch.device, rounds: int = 20, warm: int = 3) -> float:
    """Median seconds of a call on the device."""
    for _ in range(warm):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda.synchronize()
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in marks) / 1e3
