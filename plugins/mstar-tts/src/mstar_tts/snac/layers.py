"""What SNAC's decoder is made of: signals ``[rows, channels, T]``, zeros beyond both ends at every layer.

Reference: ``snac`` 1.2.1 (``layers.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar_tts.codec_blocks import Snake

__all__ = ["Conv", "DecoderBlock", "Noise", "ResidualUnit", "Upsample"]

DILATIONS = (1, 3, 9)
KERNEL = 7
REACH = sum(DILATIONS) * (KERNEL // 2)
"""Samples to either side that a block's residual units look at."""

Noise = Callable[[int, int], Tensor]
"""``(block, samples)`` to standard normal numbers ``[rows, 1, samples]`` for a block's signal."""


class _Factors(nn.Module):
    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.original0 = nn.Parameter(torch.empty(shape[0], *[1] * (len(shape) - 1)))
        self.original1 = nn.Parameter(torch.empty(shape))


class _Normed(nn.Module):
    """A weight published as the two factors of a weight norm, which :meth:`settle` multiplies out."""

    def __init__(self, shape: tuple[int, ...], bias: int):
        super().__init__()
        self.parametrizations = nn.ModuleDict({"weight": _Factors(shape)})
        self.bias = nn.Parameter(torch.empty(bias)) if bias else None

    def settle(self, dtype: torch.dtype) -> None:
        """Once, after loading."""
        factors = self.parametrizations["weight"]
        assert isinstance(factors, _Factors)
        weight = torch._weight_norm(factors.original1, factors.original0, 0)
        del self.parametrizations
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.to(dtype), requires_grad=False)


class Conv(_Normed):
    """As long as its input: zeros on both sides."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, groups: int = 1, bias: bool = True
    ):
        super().__init__((outputs, inputs // groups, kernel), outputs if bias else 0)
        self.dilation, self.groups, self.padding = dilation, groups, (kernel - 1) * dilation // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, 1, self.padding, self.dilation, self.groups)


class Upsample(_Normed):
    """A transposed convolution, *rate* times as long as its input."""

    def __init__(self, inputs: int, outputs: int, rate: int):
        super().__init__((inputs, outputs, 2 * rate), outputs)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        rate = self.rate
        return F.conv_transpose1d(x, self.weight, self.bias, rate, math.ceil(rate / 2), rate % 2)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int, groups: int):
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            Conv(channels, channels, KERNEL, dilation=dilation, groups=groups),
            Snake(channels),
            Conv(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.block(x)
        return y


class NoiseBlock(nn.Module):
    """Noise as loud as a projection of the signal says."""

    def __init__(self, channels: int):
        super().__init__()
        self.linear = Conv(channels, channels, 1, bias=False)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(x, noise.to(x.dtype), self.linear(x))


class DecoderBlock(nn.Module):
    """:param number: of the block, from 0: which noise is its own."""

    def __init__(self, inputs: int, outputs: int, rate: int, number: int, noise: bool, depthwise: bool):
        super().__init__()
        self.rate, self.number = rate, number
        groups = outputs if depthwise else 1
        units = [ResidualUnit(outputs, dilation, groups) for dilation in DILATIONS]
        drawn = [NoiseBlock(outputs)] if noise else []
        self.block = nn.ModuleList([Snake(inputs), Upsample(inputs, outputs, rate), *drawn, *units])

    def forward(self, x: Tensor, noise: Noise) -> Tensor:
        for layer in self.block:
            x = layer(x, noise(self.number, x.shape[2])) if isinstance(layer, NoiseBlock) else layer(x)
        return x
