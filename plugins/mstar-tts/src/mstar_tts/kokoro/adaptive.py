"""Norms whose scale and shift come from a style, with what follows them, and the residual blocks made of them.

Rows are padded, channels last, as in :mod:`mstar_tts.kokoro.layers`. Instance norms take their statistics from a row's
valid frames only.

Reference: ``kokoro`` 0.9.4 (``AdaIN1d``, ``AdaLayerNorm``, ``AdainResBlk1d``, ``AdaINResBlock1``); adaptive instance
norm: Huang and Belongie, 2017; Snake: Ziyin et al., 2020.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear
from mstar_tts.kokoro.layers import Conv, keep
from mstar_tts.kokoro.ops import adain_leaky, adain_snake

__all__ = ["AdaIN", "AdaLayerNorm", "SnakeBlock", "StyleBlock"]


class _Styled(nn.Module):
    def __init__(self, style: int, channels: int):
        super().__init__()
        self.fc = Linear(style, 2 * channels, bias=True)

    def factors(self, style: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and shift ``[rows, channels]`` of *style* ``[rows, style]``."""
        scale, shift = self.fc(style).chunk(2, 1)
        return 1 + scale, shift


class AdaLayerNorm(_Styled):
    """Layer norm over the channels."""

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale, shift = self.factors(style)
        return F.layer_norm(x, x.shape[-1:]) * scale[:, None] + shift[:, None]


class AdaIN(_Styled):
    """Instance norm over each row's valid frames, and the activation after it. Zero beyond the lengths."""

    def leaky(self, x: Tensor, lengths: Tensor, style: Tensor) -> Tensor:
        return adain_leaky(x, lengths, *self.factors(style))

    def snake(self, x: Tensor, lengths: Tensor, style: Tensor, alpha: Tensor) -> Tensor:
        return adain_snake(x, lengths, *self.factors(style), alpha)


class _Double(nn.Module):
    """A depthwise transposed convolution that doubles the rate: kernel 3, stride 2."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight_g = nn.Parameter(torch.empty(channels, 1, 1))
        self.weight_v = nn.Parameter(torch.empty(channels, 1, 3))
        self.bias = nn.Parameter(torch.empty(channels))

    def settle(self, dtype: torch.dtype) -> None:
        weight = torch._weight_norm(self.weight_v, self.weight_g, 0)[:, 0].T
        for name in ("weight_g", "weight_v"):
            del self._parameters[name]
        self.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)  # [3, channels]
        self.bias = nn.Parameter(self.bias.to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        following = F.pad(x[:, 1:], (0, 0, 0, 1))
        even = x * self.weight[1] + self.bias
        odd = x * self.weight[2] + following * self.weight[0] + self.bias
        return torch.stack([even, odd], 2).flatten(1, 2)


class StyleBlock(nn.Module):
    """A residual block of two convolutions of three frames. *double*: it doubles the frame rate."""

    def __init__(self, in_channels: int, out_channels: int, style: int, double: bool = False):
        super().__init__()
        self.doubles = double
        self.norm1, self.norm2 = AdaIN(style, in_channels), AdaIN(style, out_channels)
        self.conv1, self.conv2 = Conv(in_channels, out_channels, 3), Conv(out_channels, out_channels, 3)
        if in_channels != out_channels:
            self.conv1x1 = Conv(in_channels, out_channels, 1, bias=False)
        if double:
            self.pool = _Double(in_channels)

    def forward(self, x: Tensor, lengths: Tensor, style: Tensor) -> Tensor:
        """*lengths*: of *x*. What lies beyond the lengths of the result is not zero."""
        y, after = self.norm1.leaky(x, lengths, style), lengths
        if self.doubles:
            after = 2 * lengths
            y = keep(self.pool(y), after)
        y = self.conv2(self.norm2.leaky(self.conv1(y), after, style))
        if hasattr(self, "conv1x1"):
            x = self.conv1x1(x)
        if self.doubles:
            x = x.repeat_interleave(2, 1)
        out: Tensor = (y + x) * sqrt(0.5)
        return out


class SnakeBlock(nn.Module):
    """A residual block of the generator: three pairs of convolutions, the first of each pair dilated."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...], style: int):
        super().__init__()
        self.convs1 = nn.ModuleList(Conv(channels, channels, kernel, dilation=d) for d in dilations)
        self.convs2 = nn.ModuleList(Conv(channels, channels, kernel) for _ in dilations)
        self.adain1 = nn.ModuleList(AdaIN(style, channels) for _ in dilations)
        self.adain2 = nn.ModuleList(AdaIN(style, channels) for _ in dilations)
        self.alpha1 = nn.ParameterList(nn.Parameter(torch.empty(1, channels, 1)) for _ in dilations)
        self.alpha2 = nn.ParameterList(nn.Parameter(torch.empty(1, channels, 1)) for _ in dilations)

    def forward(self, x: Tensor, lengths: Tensor, style: Tensor) -> Tensor:
        """What lies beyond the lengths of the result is not zero."""
        parts = zip(self.convs1, self.convs2, self.adain1, self.adain2, self.alpha1, self.alpha2, strict=True)
        for conv1, conv2, norm1, norm2, alpha1, alpha2 in parts:
            y = conv1(norm1.snake(x, lengths, style, alpha1.flatten()))
            x = x + conv2(norm2.snake(y, lengths, style, alpha2.flatten()))
        return x
