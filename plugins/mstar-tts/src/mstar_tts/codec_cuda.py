"""The operations of :mod:`mstar_tts.codec_ops` as Triton kernels, one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["snake"]

_BLOCK = 1024
"""Items that one program computes, all of one channel: its two numbers are read once."""


@triton.jit
def _snake(x, frequency, gain, out, channels, length, block: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < length
    turn = tl.load(frequency + line % channels).to(tl.float32)
    share = tl.load(gain + line % channels).to(tl.float32)
    value = tl.load(x + line * length + at, mask=inside, other=0).to(tl.float32)
    wave = tl.sin(value * turn)
    tl.store(out + line * length + at, (value + share * wave * wave).to(out.dtype.element_ty), mask=inside)


def snake(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """:func:`mstar_tts.codec_ops.snake`; arithmetic is float32, the result is rounded once."""
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, channels, length = x.shape
    if x.numel():
        grid = (rows * channels, triton.cdiv(length, _BLOCK))
        _snake[grid](x, frequency, gain, out, channels, length, _BLOCK)
    return out
