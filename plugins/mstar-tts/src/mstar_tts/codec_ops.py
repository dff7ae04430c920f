"""The elementwise work between a codec's convolutions, one call each: Triton kernels on CUDA, else plain torch, which
says what each means."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from mstar.nn.ops import cuda_kernels_fault

__all__ = ["plain_snake", "snake"]


def snake(x: Tensor, frequency: Tensor, gain: Tensor, before: Tensor | None = None) -> Tensor:
    """``x + gain * sin(frequency * x)²``. *x* ``[rows, channels, T]``; *frequency* and *gain* ``[channels]``.

    :param before: ``[rows, channels, P]``, put before the result: what a convolution that looks back reads is then
        written once.
    """
    kernels = _kernels() if x.is_cuda else None
    make = plain_snake if kernels is None else kernels.snake
    out: Tensor = make(x, frequency, gain, before)
    return out


def plain_snake(x: Tensor, frequency: Tensor, gain: Tensor, before: Tensor | None = None) -> Tensor:
    """:func:`snake` in plain torch."""
    y = x + gain[:, None] * torch.sin(x * frequency[:, None]).square()
    return y if before is None else torch.cat([before, y], 2)


@cache
def _kernels() -> ModuleType | None:
    if cuda_kernels_fault() is not None:
        return None
    import mstar_tts.codec_cuda as kernels

    return kernels
