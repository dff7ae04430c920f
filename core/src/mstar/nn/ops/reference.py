"""The operations of :mod:`mstar.nn.ops` in plain torch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "rotate", "silu_mul", "store_rows"]


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        residual.add_(delta)
    if residual.is_cuda and residual.dtype == weight.dtype:
        return F.rms_norm(residual, weight.shape, weight, eps)
    # The mean of squares is taken in float32 whatever the dtype. torch's own rms_norm is seven kernels on the CPU.
    length = torch.linalg.vector_norm(residual, 2, -1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(length.square().div_(weight.shape[0]).add_(eps))
    return torch.mul(residual, scale).to(weight.dtype).mul_(weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotate(heads: Tensor, turning: int, cos: Tensor, sin: Tensor) -> Tensor:
    x = heads[:, :turning]
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    shape = (places.shape[0], keys.shape[1])
    keys.index_copy_(0, places, k.reshape(shape).to(keys.dtype))
    values.index_copy_(0, places, v.reshape(shape).to(values.dtype))
