"""The operations of :mod:`mstar.nn.ops` as numba kernels. What a kernel does not take goes to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.nn.ops import kernels, reference
from mstar.nn.ops.jit import float_bits

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "rotate",
    "rotate_store",
    "rotation",
    "sigmoid_mul",
    "silu_mul",
    "store_rows",
]

rotation = reference.rotation  # once a step: torch's own kernels will do
sigmoid_mul = reference.sigmoid_mul
add_layer_norm = reference.add_layer_norm  # of encoders, whose products are what takes time

_KERNELS = {torch.float32: 0, torch.bfloat16: 1}
_SHARED = 1 << 15
"""Elements from which on several threads are worth waking: some 20 microseconds of work."""


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    which = _KERNELS.get(weight.dtype) if dtype in (None, weight.dtype) else None
    plain = delta is not None and delta.shape == residual.shape and delta.is_contiguous()
    same = delta is None or (plain and delta.dtype is weight.dtype)
    if which is None or residual.dtype is not torch.float32 or not residual.is_contiguous() or not same:
        return reference.add_rms_norm(residual, delta, weight, eps, dtype)
    out = torch.empty_like(residual, dtype=weight.dtype)
    size = weight.shape[0]
    count = residual.numel()
    kernels.add_rms_norm_kernels[which](
        count >= _SHARED,
        residual.data_ptr(),
        0 if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        count // size,
        size,
        float_bits(eps),
    )
    return out


def silu_mul(gate_up: Tensor, following: Tensor | None = None) -> Tensor:
    which = _KERNELS.get(gate_up.dtype)
    if which is None or gate_up.dim() != 2 or not gate_up.is_contiguous():
        return reference.silu_mul(gate_up)
    rows, both = gate_up.shape
    out = gate_up.new_empty((rows, both // 2))
    kernels.silu_mul_kernels[which](rows * both >= _SHARED, gate_up.data_ptr(), out.data_ptr(), rows, both // 2)
    return out


def rotate(heads: Tensor, turning: int, cos: Tensor, sin: Tensor) -> Tensor:
    which = _KERNELS.get(heads.dtype)
    rows, _, size = heads.shape
    stride, *inner = heads.stride()
    fits = inner == [size, 1] and cos.dtype is sin.dtype is heads.dtype and cos.is_contiguous() and sin.is_contiguous()
    if which is None or not fits:
        return reference.rotate(heads, turning, cos, sin)
    kernels.rotate_kernels[which](
        rows * turning * size >= _SHARED,
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        stride,
        turning,
        size,
    )
    return heads[:, :turning]


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    which = _KERNELS.get(keys.dtype)
    size = k.shape[-1]
    (k_stride, *k_inner), (v_stride, *v_inner) = k.stride(), v.stride()
    fits = k.dtype is v.dtype is keys.dtype and k_inner == v_inner == [size, 1] and keys.is_contiguous()
    if which is None or not fits or not values.is_contiguous():
        reference.store_rows(keys, values, places, k, v)
        return
    tokens, width = keys.shape
    kernels.store_kernels[which](
        False,
        keys.data_ptr(),
        values.data_ptr(),
        places.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        places.shape[0],
        width,
        k_stride,
        v_stride,
        tokens,
    )


rotate_store = reference.composed(add_rms_norm, rotate, store_rows)
