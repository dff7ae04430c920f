"""The elementwise work between a codec's convolutions, one call each: Triton kernels on CUDA, else plain torch, which
says what each means."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from mstar.nn.ops import cuda_kernels_fault

__all__ = ["plain_snake", "snake"]


def snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """``x + gain * sin(frequency * x)²``. *x* ``[rows, channels, T]``; *frequency* and *gain* ``[channels]``."""
    kernels = _kernels() if x.is_cuda else None
    return plain_snake(x, frequency, gain) if kernels is None else kernels.snake(x, frequency, gain)


def plain_snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """:func:`snake` in plain torch."""
    return x + gain[:, None] * torch.sin(x * frequency[:, None]).square()


@cache
def _kernels() -> ModuleType | None:
    if cuda_kernels_fault() is not None:
        return None
    import mstar_tts.codec_cuda as kernels

    return kernels
