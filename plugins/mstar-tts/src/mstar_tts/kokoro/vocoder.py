"""From aligned text features, pitch and energy to sound: StyleTTS 2's decoder and an iSTFTNet generator with a harmonic
source.

The source is deterministic but for its noise, which the caller gives. It and the transforms are float32 always: small
errors of phase can be heard.

References: ``kokoro`` 0.9.4 (``istftnet.py``: ``Decoder``, ``Generator``, ``SourceModuleHnNSF``); iSTFTNet: Kaneko et
al., 2022; the source: Wang, Takaki and Yamagishi, 2020.
"""

from __future__ import annotations

from math import pi, prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear
from mstar_tts.kokoro.adaptive import SnakeBlock, StyleBlock
from mstar_tts.kokoro.config import RATE, VocoderConfig
from mstar_tts.kokoro.layers import Conv, Upsample, keep
from mstar_tts.kokoro.spectrum import Spectrum

__all__ = ["HARMONICS", "Vocoder"]

HARMONICS = 9
"""Sines of the source: the fundamental and eight above it."""

_SINE, _NOISE, _VOICED_HZ = 0.1, 0.003, 10.0


class _Source(nn.Module):
    """The sound of vocal cords: sines at multiples of the pitch where there is one, noise elsewhere."""

    def __init__(self, scale: int):
        super().__init__()
        self.scale = scale
        self.l_linear = Linear(HARMONICS, 1, bias=True)

    def forward(self, f0: Tensor, noise: Tensor) -> Tensor:
        """*f0* in Hz, ``[rows, P]``, zero beyond the rows' ends; *noise* ``[rows, HARMONICS, P * scale]``. Returns
        ``[rows, P * scale]`` in -1…1.

        The reference also draws a phase for each harmonic, of which nothing is left after its interpolation.
        """
        multiples = torch.arange(1, HARMONICS + 1, device=f0.device, dtype=f0.dtype)
        turns = (f0[:, None] * multiples[:, None] / RATE) % 1
        phase = torch.cumsum(turns, 2) * 2 * pi
        phase = F.interpolate(phase * self.scale, scale_factor=float(self.scale), mode="linear")
        voiced = (f0 > _VOICED_HZ).to(f0.dtype).repeat_interleave(self.scale, 1)[:, None]
        sines = torch.sin(phase) * _SINE * voiced
        sines = sines + (voiced * _NOISE + (1 - voiced) * _SINE / 3) * noise
        return torch.tanh(self.l_linear(sines.transpose(1, 2)))[:, :, 0]


class _Generator(nn.Module):
    def __init__(self, config: VocoderConfig, style: int):
        super().__init__()
        self.config = config
        channels = [config.channels // 2 ** (i + 1) for i in range(len(config.rates))]
        harmonics = config.n_fft + 2
        self.m_source = _Source(config.f0_samples)
        self.stft = Spectrum(config.n_fft, config.hop)
        self.ups = nn.ModuleList(
            Upsample(2 * width, width, kernel, rate)
            for width, kernel, rate in zip(channels, config.kernels, config.rates, strict=True)
        )
        self.resblocks = nn.ModuleList(
            SnakeBlock(width, kernel, dilations, style)
            for width in channels
            for kernel, dilations in zip(config.block_kernels, config.block_dilations, strict=True)
        )
        self.noise_convs, self.noise_res = nn.ModuleList(), nn.ModuleList()
        for index, width in enumerate(channels):
            stride = prod(config.rates[index + 1 :])
            last = index + 1 == len(channels)
            size, padding = (1, 0) if last else (2 * stride, (stride + 1) // 2)
            self.noise_convs.append(Conv(harmonics, width, size, stride=stride, padding=padding, normed=False))
            self.noise_res.append(SnakeBlock(width, 11 if last else 7, (1, 3, 5), style))
        self.conv_post = Conv(channels[-1], harmonics, 7)

    def forward(self, x: Tensor, lengths: Tensor, style: Tensor, f0: Tensor, noise: Tensor) -> Tensor:
        """*x* ``[rows, P, channels]``, of which ``lengths`` are valid, as of *f0* ``[rows, P]``."""
        config = self.config
        source = self.m_source(f0, noise)
        harmonics = self.stft(source, lengths * config.f0_samples).to(x.dtype)
        per_stage = len(config.block_kernels)
        for index, up in enumerate(self.ups):
            last = index + 1 == len(self.ups)
            x = up(keep(F.leaky_relu(x, 0.1), lengths))
            lengths = lengths * config.rates[index]
            if last:  # one more frame, mirrored, as a centred transform has
                x = torch.cat([x[:, 1:2], x], 1)
                lengths = lengths + 1
            x = x + self.noise_res[index](self.noise_convs[index](harmonics), lengths, style)
            blocks = self.resblocks[index * per_stage : (index + 1) * per_stage]
            x = sum(block(x, lengths, style) for block in blocks) / per_stage
        x = self.conv_post(keep(F.leaky_relu(x), lengths)).float()
        bins = config.n_fft // 2 + 1
        magnitude, angle = x[:, :, :bins], x[:, :, bins:]
        return self.stft.inverse(magnitude.exp(), angle.sin(), lengths)


class Vocoder(nn.Module):
    """``decoder`` of the published weights. *text*: width of the aligned text features."""

    def __init__(self, config: VocoderConfig, text: int, style: int):
        super().__init__()
        width, beside = config.width, config.text + 2
        self.encode = StyleBlock(text + 2, width, style)
        self.decode = nn.ModuleList(
            StyleBlock(width + beside, config.channels if last else width, style, double=last)
            for last in (False, False, False, True)
        )
        self.F0_conv, self.N_conv = (Conv(1, 1, 3, stride=2) for _ in range(2))
        self.asr_res = nn.ModuleList([Conv(text, config.text, 1)])
        self.generator = _Generator(config, style)

    def forward(
        self, text: Tensor, f0: Tensor, energy: Tensor, style: Tensor, noise: Tensor, lengths: Tensor
    ) -> Tensor:
        """*text* ``[rows, F, text]``, *f0* and *energy* ``[rows, 2 * F]``, all zero beyond the ``lengths`` frames
        (int64 ``[rows]``); *noise* ``[rows, HARMONICS, samples]``. Returns float32 ``[rows, samples]``; what lies
        beyond a row's end means nothing."""
        dtype = self.F0_conv.weight.dtype
        text = text.to(dtype)
        curves = [
            keep(conv(curve[:, :, None].to(dtype)), lengths)
            for conv, curve in ((self.F0_conv, f0), (self.N_conv, energy))
        ]
        x = self.encode(torch.cat([text, *curves], 2), lengths, style)
        beside = torch.cat([keep(self.asr_res[0](text), lengths), *curves], 2)
        for block in self.decode:
            x = block(torch.cat([keep(x, lengths), beside], 2), lengths, style)
        out: Tensor = self.generator(x, 2 * lengths, style, f0, noise)
        return out
