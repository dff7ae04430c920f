"""The floor of a denoise step: the time of its matrix products and attention alone, as PyTorch runs them.

Each product and each attention of one step is recorded with its shapes. They are then run in their order, with the
step's own weights, as one graph that is repeated as often as a picture has steps: :func:`~image.steady.steady`. What is
left of a step is norms, modulation, rotation and launches. ``cold``: every shape by itself, on a device that has
rested, and counted as often as it came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from image.steady import captured, seconds, steady
from mstar.nn.linear import Linear
from mstar.nn.node import Node, Step
from mstar_diffusion.dit import attention

__all__ = ["floor"]


@dataclass(frozen=True)
class _Call:
    """A product by *weight*, or attention where there is none. *shape*: of the input or the queries; *other*: of the
    weight or the keys."""

    shape: tuple[int, ...]
    other: tuple[int, ...]
    weight: Tensor | None = None

    @property
    def kind(self) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        return self.weight is None, self.shape, self.other


def floor(node: Node, inputs: dict[str, Tensor], step: Step, rounds: int, steps: int) -> dict[str, float]:
    """Of one call of ``node.step``, of which a picture has *steps*: seconds of products and attention in their order
    (``step_floor_s``), of the products and of the attention among themselves, and each ``cold``."""
    calls: list[_Call] = []
    with torch.inference_mode():
        node.step(step, **inputs)  # type: ignore[operator]  # what is tried at a first call is not part of a step
        with _recorded(calls):
            node.step(step, **inputs)  # type: ignore[operator]
        given = {call.kind: _inputs(call, step) for call in calls}
        parts = {
            "step_floor": calls,
            "products": [call for call in calls if call.weight is not None],
            "attention": [call for call in calls if call.weight is None],
        }
        found = {"calls": float(len(calls)), "tflop": sum(_operations(call) for call in calls) / 1e12}
        for name, some in parts.items():
            run = _in_order(some, given, step)
            run()
            repeat, _ = captured(run, step.device)
            found |= steady(repeat, step.device, rounds, steps, name)
        found |= {"cold_products_s": 0.0, "cold_attention_s": 0.0}
        for call, count in _counted(calls):
            once = seconds(_in_order([call], given, step), step.device, rounds)
            found["cold_attention_s" if call.weight is None else "cold_products_s"] += count * once
    found["cold_step_floor_s"] = found["cold_products_s"] + found["cold_attention_s"]
    return found


def _operations(call: _Call) -> float:
    """Additions and multiplications, of attention with all keys."""
    if call.weight is None:
        return 4.0 * math.prod(call.shape) * call.other[-2]
    return 2.0 * math.prod(call.shape) * call.other[0]


def _counted(calls: Sequence[_Call]) -> Iterator[tuple[_Call, int]]:
    counts = Counter(call.kind for call in calls)
    for kind, call in {call.kind: call for call in calls}.items():
        yield call, counts[kind]


def _in_order(calls: Sequence[_Call], given: dict[Any, tuple[Tensor, ...]], step: Step) -> Callable[[], None]:
    def run() -> None:
        with attention.attention_by("sdpa", step.device):
            for call in calls:
                if call.weight is None:
                    F.scaled_dot_product_attention(*given[call.kind])
                else:
                    F.linear(*given[call.kind], call.weight)

    return run


def _inputs(call: _Call, step: Step) -> tuple[Tensor, ...]:
    shapes = (call.shape, call.other, call.other) if call.weight is None else (call.shape,)
    return tuple(torch.randn(shape, device=step.device, dtype=step.dtype) for shape in shapes)


@contextmanager
def _recorded(calls: list[_Call]) -> Iterator[None]:
    # not `forward`, which kinds of layers have their own of
    plain, sdpa = Linear._multiplied, attention.F.scaled_dot_product_attention

    def product(self: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(_Call(tuple(x.shape), tuple(self.weight.shape), self.weight))
        return plain(self, x, bias)

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Tensor:
        calls.append(_Call(tuple(q.shape), tuple(k.shape)))
        return sdpa(q, k, v, *more, **named)

    Linear._multiplied = product  # type: ignore[method-assign]
    attention.F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        Linear._multiplied = plain  # type: ignore[method-assign]
        attention.F.scaled_dot_product_attention = sdpa  # type: ignore[assignment]
