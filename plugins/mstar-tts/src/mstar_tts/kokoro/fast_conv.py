"""Convolutions of many taps with fewer multiplications, for float32 on a CPU, where they are nearly all of the work.

A filter over a signal of every sample is three filters of half its taps over every second sample: the even ones, the
odd ones, and their sum (the "fast FIR algorithm": Parhi, VLSI Digital Signal Processing Systems, 1999, chapter 9). That
is three quarters of the multiplications, and each of the three can be cut again. It works for odd dilations as it does
without. Results differ from a plain convolution's by rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar_tts.kokoro import kernels

__all__ = ["FastConv"]


class FastConv:
    """:param weight: ``[out, in, taps]`` float32. :param dilation: odd. :param depth: how often filters are halved."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int, padding: int, depth: int):
        self._filter = _Filter(weight, dilation, depth)
        self._bias = None if bias is None else bias.contiguous()
        self._padding = padding
        self._shrinks = (weight.shape[2] - 1) * dilation - 2 * padding

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, T, in]`` to ``[rows, T', out]``, as ``conv1d`` with that padding."""
        return self._filter(x.contiguous(), x.shape[1] - self._shrinks, self._padding, self._bias)


class _Filter:
    def __init__(self, weight: Tensor, dilation: int, depth: int):
        self.taps, self.dilation = weight.shape[2], dilation
        self.halves: tuple[_Filter, _Filter, _Filter] | None = None
        if depth == 0 or self.taps < 3:
            self.weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
            return
        even, odd = weight[:, :, ::2], weight[:, :, 1::2]
        both = even.clone()
        both[:, :, : odd.shape[2]] += odd
        even_filter, odd_filter, both_filter = (_Filter(part, dilation, depth - 1) for part in (even, odd, both))
        self.halves = even_filter, odd_filter, both_filter
        self.shift = dilation // 2

    def __call__(self, x: Tensor, count: int, padding: int = 0, bias: Tensor | None = None) -> Tensor:
        """The first *count* outputs over *x* ``[rows, T, in]`` with *padding* zeros before it, and any after it.

        With e and o the even and odd samples, A and B the even and odd taps, and a sample's index in brackets, outputs
        are ``A e[u] + B o[u + shift]`` and ``A o[u] + B e[u + shift + 1]``. The sum of the latter's products is in
        ``(A + B)(o[u] + e[u + shift + 1])``, beside two that are there already.
        """
        if self.halves is None:
            return self._plain(x, count, padding, bias)
        even_filter, odd_filter, both_filter = self.halves
        half = (count + 1) // 2
        ahead = half + self.shift + 1
        reach = ahead + (even_filter.taps - 1) * self.dilation
        e, o, both = kernels.split(x, padding, reach, self.shift + 1)
        return kernels.merge(
            even_filter(e, ahead), odd_filter(o, ahead), both_filter(both, half), bias, count, self.shift
        )

    def _plain(self, x: Tensor, count: int, padding: int, bias: Tensor | None) -> Tensor:
        need = count + (self.taps - 1) * self.dilation
        if padding or x.shape[1] < need:
            x = F.pad(x, (0, 0, padding, max(0, need - padding - x.shape[1])))
        rows, length, channels = x.shape
        image = x.as_strided((rows, channels, 1, need), (length * channels, 1, length * channels, channels))
        y = F.conv2d(image, self.weight, bias, 1, 0, (1, self.dilation))
        return y.permute(0, 2, 3, 1).squeeze(1)
