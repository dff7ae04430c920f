"""The operations of :mod:`mstar.nn.ops` in plain torch, for any device and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "HeadNorms",
    "add_channels",
    "add_layer_norm",
    "add_rms_norm",
    "composed",
    "group_norm",
    "rotate",
    "rotate_store",
    "rotation",
    "sigmoid_mul",
    "silu_mul",
    "store_rows",
    "whole",
]

RotateStore = Callable[
    [Tensor, int, Tensor, Tensor, "HeadNorms | None", Tensor | None, Tensor | None, Tensor | None],
    tuple[Tensor, Tensor, Tensor],
]


class HeadNorms(NamedTuple):
    """RMS norms over each head of q and of k: weights ``[head_dim]`` (the heads' dtype or float32) and the epsilon that
    both use."""

    q: Tensor
    k: Tensor
    eps: float


def whole(delta: Tensor, residual: Tensor) -> Tensor:
    """What is to be added to *residual*: *delta*, or the sum of its parts along a first dimension of their own."""
    return delta.sum(0) if delta.dim() > residual.dim() else delta


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    if delta is not None:
        residual.add_(whole(delta, residual))
    if residual.is_cuda and residual.dtype == weight.dtype and dtype in (None, weight.dtype):
        return F.rms_norm(residual, weight.shape, weight, eps)
    # The mean of squares is taken in float32 whatever the dtype. torch's own rms_norm is seven kernels on the CPU.
    length = torch.linalg.vector_norm(residual, 2, -1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(length.square().div_(weight.shape[0]).add_(eps))
    return torch.mul(residual, scale).to(weight.dtype).mul_(weight).to(dtype or weight.dtype)


def add_layer_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if delta is not None:
        residual.add_(delta)
    return F.layer_norm(residual, weight.shape, weight, bias, eps)


def silu_mul(gate_up: Tensor, following: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return gate.sigmoid().mul_(x)


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool = False, added: Tensor | None = None
) -> Tensor:
    if added is not None:
        x = x + added.view(1, -1, *[1] * (x.dim() - 2))
    if torch.compiler.is_compiling():  # torch's own becomes one opaque kernel there, which refuses some strides
        grouped = x.float().reshape(x.shape[0], groups, -1)
        var, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        shape = (1, -1, *[1] * (x.dim() - 2))
        normed = ((grouped - mean) * torch.rsqrt(var + eps)).reshape(x.shape) * weight.view(shape) + bias.view(shape)
    else:
        normed = F.group_norm(x, groups, weight, bias, eps)
    return (F.silu(normed) if silu else normed).to(x.dtype)


def add_channels(x: Tensor, y: Tensor, added: Tensor) -> Tensor:
    return x + (y + added.view(1, -1, *[1] * (x.dim() - 2)))


def rotate(heads: Tensor, turning: int, cos: Tensor, sin: Tensor) -> Tensor:
    x = heads[:, :turning]
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    shape = (places.shape[0], keys.shape[1])
    keys.index_copy_(0, places, k.reshape(shape).to(keys.dtype))
    values.index_copy_(0, places, v.reshape(shape).to(values.dtype))


def rotation(
    positions: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    places = positions.unsqueeze(1) if axes is None else positions.t().index_select(1, axes)
    angles = (places.to(torch.float32) * inverse).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return cos.to(dtype), sin.to(dtype)


def composed(
    norm: Callable[[Tensor, Tensor | None, Tensor, float, torch.dtype], Tensor],
    turn: Callable[[Tensor, int, Tensor, Tensor], Tensor],
    store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
) -> RotateStore:
    """``rotate_store`` as a sequence of these three operations."""

    def rotate_store(
        heads: Tensor,
        q_heads: int,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
        keys: Tensor | None,
        values: Tensor | None,
        places: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        turning = (q_heads + heads.shape[1]) // 2  # q and k in one go: same operation, same angles
        v = heads[:, turning:]
        if norms is not None:
            q, k = heads[:, :q_heads], heads[:, q_heads:turning]
            heads = torch.cat(
                (norm(q, None, norms.q, norms.eps, q.dtype), norm(k, None, norms.k, norms.eps, k.dtype)), 1
            )
        turned = turn(heads, turning, cos, sin)
        q, k = turned[:, :q_heads], turned[:, q_heads:]
        if keys is not None and values is not None and places is not None:
            store(keys, values, places, k, v)
        return q, k, v

    return rotate_store


rotate_store = composed(add_rms_norm, rotate, store_rows)
