"""SEANet (Tagliasacchi et al., 2020), between sound and a few vectors: what Mimi, EnCodec and AudioSeal are built of.

The published weights differ in how they name the layers, so what is made here is a plain list, for :func:`run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mstar_tts.codec_blocks import Carry, CausalConv, CausalUpsample
from mstar_tts.seanet_config import SeanetConfig

__all__ = ["LSTM", "decoder_layers", "encoder_layers", "run"]


class _Residual(nn.Module):
    def __init__(self, config: SeanetConfig, channels: int, dilation: int):
        super().__init__()
        narrow = channels // config.compress
        first = CausalConv(channels, narrow, config.residual_kernel, dilation=dilation)
        self.block = nn.ModuleList([nn.ELU(), first, nn.ELU(), CausalConv(narrow, channels, 1)])
        self.shortcut = CausalConv(channels, channels, 1) if config.shortcut else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y = run(self.block, x, carry)
        beside: Tensor = x if self.shortcut is None else self.shortcut(x, carry)
        return beside + y


class LSTM(nn.Module):
    """LSTM layers beside what goes into them. ``[rows, channels, T]``, and so is the output."""

    def __init__(self, channels: int, layers: int):
        super().__init__()
        self.lstm = nn.LSTM(channels, channels, layers)
        self.carried = 2 * layers * channels

    def settle(self) -> None:
        self.lstm.flatten_parameters()

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        rows, channels, _ = x.shape
        shape = (2, self.lstm.num_layers, channels)
        before = carry.take(shape, x)
        if before is None:
            before = x.new_zeros(rows, *shape)
        hidden, cell = before.permute(1, 2, 0, 3).contiguous()
        y, after = self.lstm(x.permute(2, 0, 1), (hidden, cell))
        carry.keep(torch.stack(after).permute(2, 0, 1, 3))
        out: Tensor = x + y.permute(1, 2, 0)
        return out


def encoder_layers(config: SeanetConfig) -> list[nn.Module]:
    """From ``[rows, 1, samples]`` to ``[rows, width, samples / ratios]``."""
    channels = config.filters
    layers: list[nn.Module] = [CausalConv(1, channels, config.kernel)]
    for ratio in config.ratios:
        layers += _residuals(config, channels)
        layers += [nn.ELU(), CausalConv(channels, 2 * channels, 2 * ratio, stride=ratio)]
        channels *= 2
    layers += [LSTM(channels, config.lstm)] if config.lstm else []
    return [*layers, nn.ELU(), CausalConv(channels, config.width, config.last_kernel)]


def decoder_layers(config: SeanetConfig) -> list[nn.Module]:
    """Back to ``[rows, 1, samples]``."""
    channels = config.filters * 2 ** len(config.ratios)
    layers: list[nn.Module] = [CausalConv(config.width, channels, config.kernel)]
    layers += [LSTM(channels, config.lstm)] if config.lstm else []
    for ratio in reversed(config.ratios):
        channels //= 2
        layers += [nn.ELU(), CausalUpsample(2 * channels, channels, 2 * ratio, ratio), *_residuals(config, channels)]
    return [*layers, nn.ELU(), CausalConv(channels, 1, config.last_kernel)]


def _residuals(config: SeanetConfig, channels: int) -> Sequence[nn.Module]:
    return [_Residual(config, channels, config.growth**index) for index in range(config.residuals)]


def run(layers: Iterable[nn.Module], x: Tensor, carry: Carry) -> Tensor:
    """*x* through *layers*."""
    for layer in layers:
        x = layer(x) if isinstance(layer, nn.ELU) else layer(x, carry)
    return x
