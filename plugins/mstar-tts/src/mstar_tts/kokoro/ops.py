"""The elementwise work between the vocoder's convolutions, one call each: numba kernels on the CPU where they work
(:mod:`mstar_tts.kokoro.kernels`), else plain torch, which says what each means."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.ops import cpu_kernels_fault
from mstar_tts.kokoro.layers import keep

__all__ = ["EPS", "LEAK", "adain_leaky", "adain_snake", "adaptive_norm"]

EPS = 1e-5
"""Of instance norms."""

LEAK = 0.2
"""Slope of the leaky rectifier below zero."""


def adain_leaky(x: Tensor, lengths: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A leaky rectifier of :func:`adaptive_norm`, zero beyond *lengths*."""
    if (kernels := _kernels(x)) is not None:
        return kernels.adain(x, lengths, scale, shift, None)  # type: ignore[no-any-return]
    return keep(F.leaky_relu(adaptive_norm(x, lengths, scale, shift), LEAK), lengths)


def adain_snake(x: Tensor, lengths: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor) -> Tensor:
    """``y + sin(alpha * y)**2 / alpha`` of :func:`adaptive_norm`, zero beyond *lengths*.

    *alpha*: float32 ``[channels]``."""
    if (kernels := _kernels(x)) is not None:
        return kernels.adain(x, lengths, scale, shift, alpha)  # type: ignore[no-any-return]
    y = adaptive_norm(x, lengths, scale, shift)
    alpha = alpha.to(y.dtype)
    return keep(y + (1 / alpha) * torch.sin(alpha * y) ** 2, lengths)


def adaptive_norm(x: Tensor, lengths: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Each channel of *x* ``[rows, T, channels]`` normalised over its row's valid frames (*lengths*, int64 ``[rows]``),
    times *scale* plus *shift* ``[rows, channels]``. Statistics are float32."""
    wide = x.float()
    count = lengths[:, None, None].float()
    mean = keep(wide, lengths).sum(1, keepdim=True) / count
    centred = wide - mean
    variance = keep(centred, lengths).square().sum(1, keepdim=True) / count
    y = centred * torch.rsqrt(variance + EPS) * scale[:, None].float() + shift[:, None].float()
    return y.to(x.dtype)


@cache
def _usable() -> ModuleType | None:
    if cpu_kernels_fault() is not None:
        return None
    from mstar_tts.kokoro import kernels

    return kernels


def _kernels(x: Tensor) -> ModuleType | None:
    return _usable() if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) else None
