"""One denoise step by plain operations, by fused kernels, and captured: is it the same, and how long does it take?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from image.floor import seconds
from mstar.nn import ops
from mstar.nn.node import Node, Step

__all__ = ["ways"]


def ways(node: Node, inputs: dict[str, Tensor], step: Step, rounds: int) -> dict[str, float]:
    """Seconds of ``node.step`` each way, and how far the last two are from the first: signal to noise of what the step
    adds to its latent, in dB. On the CPU there is the first way only."""

    def run() -> Tensor:
        return node.step(step, **inputs)["latent"]  # type: ignore[operator,no-any-return]

    with _plain_operations():
        plain = run().clone()
        found = {"plain_step_s": seconds(run, step.device, rounds)}
    if step.device.type != "cuda":
        return found
    moved = plain.float() - inputs["latent"].float()
    fused = run().clone()
    found["fused_db"] = _signal_to_noise(moved, fused.float() - plain.float())
    found["fused_step_s"] = seconds(run, step.device, rounds)
    replay, captured = _captured(run)
    replay()
    found["captured_db"] = _signal_to_noise(moved, captured.float() - plain.float())
    found["captured_step_s"] = seconds(replay, step.device, rounds)
    return found


@contextmanager
def _plain_operations() -> Iterator[None]:
    known = ops.cuda_kernels_fault
    ops.cuda_kernels_fault = lambda: "they are what is compared with"  # type: ignore[assignment]
    try:
        yield
    finally:
        ops.cuda_kernels_fault = known


def _captured(run: Callable[[], Any]) -> tuple[Callable[[], Any], Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def _signal_to_noise(signal: Tensor, noise: Tensor) -> float:
    power = float(noise.square().mean())
    return 99.0 if power == 0 else 10 * math.log10(float(signal.square().mean()) / power)
