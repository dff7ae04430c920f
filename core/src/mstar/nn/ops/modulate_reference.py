"""The operations of :mod:`mstar.nn.ops.modulate` in plain torch, for any device and dtype.

They are bit for bit what diffusers 0.42.1 computes: which of two factors comes first does not matter, the order of
additions does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from mstar.nn.ops.modulate import Addition, Heads, Norm

__all__ = ["add", "add_modulate", "modulate", "swiglu", "turn_heads"]


def modulate(x: Tensor, norm: Norm, scale: Tensor | None, shift: Tensor | None = None) -> Tensor:
    normed: Tensor = norm(x)
    if scale is not None:
        normed = (1 + scale) * normed
    return normed if shift is None else normed + shift


def add(x: Tensor, addition: Addition) -> Tensor:
    delta, gate, norm, bounded = addition
    if norm is not None:
        delta = norm(delta)
    if gate is not None:
        delta = (gate.tanh() if bounded else gate) * delta
    return x + delta


def add_modulate(
    x: Tensor, addition: Addition, norm: Norm, scale: Tensor | None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    x = add(x, addition)
    return x, modulate(x, norm, scale, shift)


def turn_heads(parts: Sequence[Heads], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _joined([part.q_norm(part.fused[:, :, 0]) for part in parts])
    k = _joined([part.k_norm(part.fused[:, :, 1]) for part in parts])
    return _turned(q, cos, sin), _turned(k, cos, sin), _joined([part.fused[:, :, 2] for part in parts])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = heads.float()
    first, second = pairs[..., ::2], pairs[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return both.flatten(-2).to(heads.dtype)


def swiglu(gate_up: Tensor, before: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    activated = F.silu(gate) * up
    return activated if before is None else torch.cat((before, activated), -1)
