"""The operations of :mod:`mstar_tts.codec_ops` as Triton kernels, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["snake"]

_BLOCK = 1024
"""Items that one program writes, all of one channel: its two numbers are read once."""


@triton.jit
def _snake(x, before, frequency, gain, out, channels, length, context, block: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    whole = context + length
    old, new = at < context, (at >= context) & (at < whole)
    turn = tl.load(frequency + line % channels).to(tl.float32)
    share = tl.load(gain + line % channels).to(tl.float32)
    value = tl.load(x + line * length + at - context, mask=new, other=0).to(tl.float32)
    wave = tl.sin(value * turn)
    kept = tl.load(before + line * context + at, mask=old, other=0).to(tl.float32)
    result = tl.where(old, kept, value + share * wave * wave)
    tl.store(out + line * whole + at, result.to(out.dtype.element_ty), mask=at < whole)


def snake(x: Tensor, frequency: Tensor, gain: Tensor, before: Tensor | None = None) -> Tensor:
    """:func:`mstar_tts.codec_ops.snake`; arithmetic is float32, the result is rounded once."""
    x = x.contiguous()
    rows, channels, length = x.shape
    context = 0 if before is None else before.shape[2]
    out = x.new_empty(rows, channels, context + length)
    if out.numel():
        grid = (rows * channels, triton.cdiv(context + length, _BLOCK))
        kept = x if before is None else before.contiguous()
        _snake[grid](x, kept, frequency, gain, out, channels, length, context, _BLOCK)
    return out
