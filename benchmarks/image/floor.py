"""The floor of a denoise step: the time of its matrix products and attention alone, as PyTorch runs them.

Each product and each attention of one step is recorded with its shapes; then every shape is timed by itself, and
counted as often as it came. What is left of a step is norms, modulation, rotation and launches.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.linear import Linear
from mstar.nn.node import Node, Step
from mstar_diffusion.dit import attention

__all__ = ["floor", "seconds"]

Call = tuple[str, tuple[int, ...], tuple[int, ...]]


def seconds(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median time of *function*."""
    function()
    found = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        function()
        _wait(device)
        found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def floor(node: Node, inputs: dict[str, Tensor], step: Step, rounds: int) -> dict[str, float]:
    """Seconds of the products and of the attention in one call of ``node.step``."""
    calls: Counter[Call] = Counter()
    with torch.inference_mode():
        node.step(step, **inputs)  # type: ignore[operator]  # what is tried at a first call is not part of a step
        with _recorded(calls):
            node.step(step, **inputs)  # type: ignore[operator]
    found = {"products_s": 0.0, "attention_s": 0.0}
    for (kind, shape, other), count in calls.items():
        once = seconds(_alone(kind, shape, other, step), step.device, rounds)
        found["products_s" if kind == "linear" else "attention_s"] += count * once
    return {**found, "calls": float(sum(calls.values()))}


@contextmanager
def _recorded(calls: Counter[Call]) -> Iterator[None]:
    plain, sdpa = Linear.forward, attention.F.scaled_dot_product_attention

    def product(self: Linear, x: Tensor) -> Tensor:
        calls["linear", tuple(x.shape), (self.out_features, self.in_features)] += 1
        return plain(self, x)

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Tensor:
        calls["attention", tuple(q.shape), tuple(k.shape)] += 1
        return sdpa(q, k, v, *more, **named)

    Linear.forward = product  # type: ignore[method-assign]
    attention.F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        Linear.forward = plain  # type: ignore[method-assign]
        attention.F.scaled_dot_product_attention = sdpa  # type: ignore[assignment]


def _alone(kind: str, shape: tuple[int, ...], other: tuple[int, ...], step: Step) -> Callable[[], Any]:
    device, dtype = step.device, step.dtype
    if kind == "linear":
        x, weight = torch.randn(shape, device=device, dtype=dtype), torch.randn(other, device=device, dtype=dtype)
        return lambda: F.linear(x, weight)
    q, k, v = (torch.randn(s, device=device, dtype=dtype) for s in (shape, other, other))

    def attend() -> Tensor:
        with attention.attention_by("sdpa", device):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
