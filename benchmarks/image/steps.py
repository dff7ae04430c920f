"""One denoise step by plain operations, by fused kernels, and captured: is it the same, and how long does it take?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from image.steady import captured, steady
from mstar.nn import ops
from mstar.nn.node import Node, Step

__all__ = ["ways"]


def ways(node: Node, inputs: dict[str, Tensor], step: Step, rounds: int, steps: int) -> dict[str, float]:
    """Seconds of ``node.step`` each way, of which a picture has *steps*, and signal to noise of its velocity, in dB:
    ``NAME_db`` of the fused and the captured way to the plain one, and ``NAME_float32_db`` of plain and fused to a step
    in float32. If these two are alike, what is between the ways is rounding. On the CPU there is the plain way only."""

    def run() -> dict[str, Tensor]:
        return node.step(step, **inputs)  # type: ignore[operator,no-any-return]

    device = step.device
    with _plain_operations():
        plain, exact = _velocity(run(), inputs), _in_float32(node, inputs, step)
        found = {"plain_float32_db": signal_to_noise(exact, plain)}
        found |= steady(run, device, rounds, steps, "plain_step")
    if device.type != "cuda":
        return found
    fused = _velocity(run(), inputs)
    found["fused_float32_db"] = signal_to_noise(exact, fused)
    found["fused_db"] = signal_to_noise(plain, fused)
    found |= steady(run, device, rounds, steps, "fused_step")
    replay, outputs = captured(run, device)
    replay()
    found["captured_db"] = signal_to_noise(plain, _velocity(outputs, inputs))
    return found | steady(replay, device, rounds, steps, "captured_step")


def _velocity(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """By the clean picture that a step at noise level 1 foresees: it is float32, and the next latent may be rounded,
    by more than a short step moves it."""
    return inputs["latent"].float() - outputs["clean"]


def _in_float32(node: Node, inputs: dict[str, Tensor], step: Step) -> Tensor:
    """The velocity with *node*'s weights, and all of its operations, in float32."""
    exact = copy.deepcopy(node)
    for tensor in (*exact.parameters(), *exact.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.float()
    given = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    return _velocity(exact.step(replace(step, dtype=torch.float32), **given), given)  # type: ignore[operator]


@contextmanager
def _plain_operations() -> Iterator[None]:
    known = ops.cuda_kernels_fault
    ops.cuda_kernels_fault = lambda: "they are what is compared with"  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.cuda_kernels_fault = known


def signal_to_noise(right: Tensor, got: Tensor) -> float:
    """Of *got*, which should be *right*, in dB; 99 where they are the same."""
    power = float((got - right).square().mean())
    return 99.0 if power == 0 else 10 * math.log10(float(right.square().mean()) / power)
