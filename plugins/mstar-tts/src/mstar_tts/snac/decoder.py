"""SNAC's decoder: windows of codes to sound.

Reference: ``snac`` 1.2.1 (``snac.py``, ``vq.py``). Two things are done differently. The noise follows from a key and
from a sample's place, so that a window sounds the same wherever it was cut and in whatever company. And where only part
of a window is asked for, each stage computes that part and what it depends on, which spares the later stages, the
longer ones, most of their work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.sampling import stream_key
from mstar_tts.codec_blocks import Snake
from mstar_tts.noise import normal
from mstar_tts.snac.config import SnacConfig
from mstar_tts.snac.layers import KERNEL, REACH, Conv, DecoderBlock, Upsample

__all__ = ["SnacDecoder", "margins"]


def margins(config: SnacConfig) -> list[int]:
    """For the signal before each stage, and before the first convolution: on how many of its samples to either side a
    sample of sound depends, at most."""
    found, after = [], KERNEL // 2
    for rate in reversed(config.rates):
        after = -(-(after + REACH + -(-rate // 2)) // rate) + 1
        found.append(after)
    return [after + KERNEL // 2, *reversed(found)]


class _Quantizer(nn.Module):
    """One codebook. Its entries are projected once, after loading."""

    def __init__(self, config: SnacConfig, stride: int):
        super().__init__()
        self.stride = stride
        self.codebook = nn.Embedding(config.codes, config.code_width)
        self.out_proj = Conv(config.code_width, config.latent, 1)

    def settle(self, dtype: torch.dtype) -> None:
        """After the projection's own."""
        entries = self.codebook.weight.T[None].to(self.out_proj.weight.dtype)
        table = self.out_proj(entries)[0].T.contiguous()
        del self.codebook, self.out_proj
        self.table = nn.Parameter(table.to(dtype), requires_grad=False)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 ``[rows, n]`` to ``[rows, n * stride, latent]``."""
        return F.embedding(codes, self.table).repeat_interleave(self.stride, 1)


class _Quantizers(nn.Module):
    def __init__(self, config: SnacConfig):
        super().__init__()
        self.quantizers = nn.ModuleList([_Quantizer(config, stride) for stride in config.strides])

    def forward(self, codes: list[Tensor]) -> Tensor:
        """Codes of each codebook, int64 ``[rows, n]``, to their sum ``[rows, latent, T]``."""
        levels = [quantizer(level) for quantizer, level in zip(self.quantizers, codes, strict=True)]
        return torch.stack(levels).sum(0).transpose(1, 2)


class _Decoder(nn.Module):
    def __init__(self, config: SnacConfig):
        super().__init__()
        groups, widths = config.latent if config.depthwise else 1, config.channels
        head = [Conv(config.latent, config.latent if config.depthwise else widths, KERNEL, groups=groups)]
        if config.depthwise:
            head.append(Conv(config.latent, widths, 1))
        blocks = []
        for number, rate in enumerate(config.rates):
            blocks.append(DecoderBlock(widths, widths // 2, rate, number, config.noise, config.depthwise))
            widths //= 2
        self.model = nn.ModuleList([*head, *blocks, Snake(widths), Conv(widths, 1, KERNEL)])


class SnacDecoder(nn.Module):
    """Under the published names ``quantizer.quantizers.N`` and ``decoder.model.N``."""

    def __init__(self, config: SnacConfig):
        super().__init__()
        self.config, self.margins = config, margins(config)
        self.quantizer = _Quantizers(config)
        self.decoder = _Decoder(config)
        self.keys = [stream_key(0, "snac", str(block)) - (1 << 63) for block in range(len(config.rates))]

    def settle(self, dtype: torch.dtype) -> None:
        """Once the published weights are in: multiply the weight norms out, project the codebooks, and bring all to
        *dtype*."""
        quantizers = []
        for module in list(self.modules()):
            if isinstance(module, Conv | Upsample | Snake):
                module.settle(dtype)
            elif isinstance(module, _Quantizer):
                quantizers.append(module)
        for quantizer in quantizers:  # after their projections
            quantizer.settle(dtype)

    def forward(self, codes: list[Tensor], key: Tensor, offset: Tensor, first: Tensor, frames: int) -> Tensor:
        """The sound of *frames* frames (fewer, if the windows have fewer) from frame *first* of each window. What is
        beyond a window's end means nothing.

        :param codes: of each codebook, int64 ``[rows, codes]``, windows of one size. :param key: int64 ``[rows]``, of
            the noise. :param offset: int64 ``[rows]``, frames before the window. :param first: int64 ``[rows]``.
        :return: float32 ``[rows, frames * frame_samples]``.
        """
        config = self.config
        x = self.quantizer(codes)
        frames = min(frames, codes[0].shape[1])
        each = config.strides[0]  # samples of a frame at this stage's rate
        start = torch.zeros_like(first)  # of the signal within the window

        def drawn(block: int, samples: int) -> Tensor:
            return normal(key ^ self.keys[block], samples, offset * each + start)[:, None]

        stage = 1
        for layer in self.decoder.model:
            if not isinstance(layer, DecoderBlock):
                x = layer(x)
                continue
            x, start = _cropped(x, start, first * each - self.margins[stage], frames * each + 2 * self.margins[stage])
            each, start, stage = each * layer.rate, start * layer.rate, stage + 1
            x = layer(x, drawn)
        places = (first * each - start)[:, None] + torch.arange(frames * each, device=x.device)
        return torch.tanh(x[:, 0].gather(1, places.clamp(max=x.shape[2] - 1))).float()


def _cropped(x: Tensor, start: Tensor, wanted: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """*length* samples of *x* ``[rows, channels, T]``, which begins at *start*, from *wanted* on or, near an end of
    *x*, as near as there are so many; and where they begin. All of *x* if it has no more."""
    rows, channels, total = x.shape
    if length >= total:
        return x, start
    begin = (wanted - start).clamp(0, total - length)
    places = begin[:, None] + torch.arange(length, device=x.device)
    return x.gather(2, places[:, None].expand(rows, channels, length)), start + begin
