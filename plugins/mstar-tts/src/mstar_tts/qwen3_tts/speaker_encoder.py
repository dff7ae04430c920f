"""Who speaks in a clip, as a vector: an ECAPA-TDNN over the clip's mel spectrogram.

References: ``qwen_tts`` 0.1.1, ``modeling_qwen3_tts.py`` (``Qwen3TTSSpeakerEncoder``, ``mel_spectrogram``); Desplanques
et al., 2020; Res2Net: Gao et al., 2019.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.node import Node, Step
from mstar.processing.mel import mel_filters
from mstar.weights.names import WeightMap
from mstar_tts.qwen3_tts.codec_config import SpeakerConfig

__all__ = ["LEAST_SAMPLES", "SpeakerEncoder", "speaker_weights"]

_FFT, _HOP, _TOP_HZ = 1024, 256, 12_000.0
_LEAST_MAGNITUDE, _LEAST_MEL, _LEAST_VARIANCE = 1e-9, 1e-5, 1e-12
_PADDING = (_FFT - _HOP) // 2

LEAST_SAMPLES = 4096
"""A shorter clip has fewer frames than the convolutions mirror at its ends."""


class _LogMel(nn.Module):
    """Magnitudes in mel bands up to 12 kHz, as logarithms. ``[samples]`` to ``[frames, bands]``, a frame every 256."""

    window: Tensor
    filters: Tensor

    def __init__(self, bands: int, rate: int):
        super().__init__()
        self.bands, self.rate = bands, rate
        self.register_buffer("window", torch.empty(_FFT), persistent=False)
        self.register_buffer("filters", torch.empty(_FFT // 2 + 1, bands), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        filters = torch.from_numpy(mel_filters(self.bands, _FFT, self.rate, _TOP_HZ).T.copy())
        return {"window": torch.hann_window(_FFT, device=device), "filters": filters.to(device)}

    def forward(self, samples: Tensor) -> Tensor:
        padded = F.pad(samples[None], (_PADDING, _PADDING), mode="reflect")[0]
        lines = torch.view_as_real(torch.fft.rfft(padded.unfold(0, _FFT, _HOP) * self.window))
        magnitude = (lines.square().sum(-1) + _LEAST_MAGNITUDE).sqrt()
        return (magnitude @ self.filters).clamp_(min=_LEAST_MEL).log_()


class _Tdnn(nn.Module):
    """A convolution, mirrored at the clip's ends, and a rectifier. ``[1, in, T]`` to ``[1, out, T]``."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, dilation: int = 1):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation)
        self.before = dilation * (kernel - 1) // 2
        self.behind = dilation * (kernel - 1) - self.before

    def forward(self, x: Tensor) -> Tensor:
        if self.behind:
            x = F.pad(x, (self.before, self.behind), mode="reflect")
        return self.conv(x).relu_()  # type: ignore[no-any-return]


class _Res2Net(nn.Module):
    """Channels in *scale* parts, each with what the part before has become."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int):
        super().__init__()
        part = channels // scale
        self.blocks = nn.ModuleList(_Tdnn(part, part, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor) -> Tensor:
        first, *parts = x.chunk(len(self.blocks) + 1, 1)
        out, before = [first], None
        for block, part in zip(self.blocks, parts, strict=True):
            before = block(part if before is None else part + before)
            out.append(before)
        return torch.cat(out, 1)


class _Squeeze(nn.Module):
    """Each channel times what the means of all say."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(channels, squeezed, 1), nn.Conv1d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        share: Tensor = self.conv2(self.conv1(x.mean(2, keepdim=True)).relu_())
        return x * share.sigmoid_()


class _Block(nn.Module):
    def __init__(self, config: SpeakerConfig, index: int):
        super().__init__()
        before, channels = config.channels[index - 1], config.channels[index]
        self.tdnn1 = _Tdnn(before, channels, 1)
        self.res2net_block = _Res2Net(channels, config.scale, config.kernels[index], config.dilations[index])
        self.tdnn2 = _Tdnn(channels, channels, 1)
        self.se_block = _Squeeze(channels, config.squeeze)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))
        return x + y


class _Pooling(nn.Module):
    """Means and deviations of each channel over time, weighted by attention. ``[1, channels, T]`` to ``[1, 2 *
    channels, 1]``."""

    def __init__(self, channels: int, attention: int):
        super().__init__()
        self.tdnn = _Tdnn(3 * channels, attention, 1)
        self.conv = nn.Conv1d(attention, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        mean, deviation = (value.expand_as(x) for value in _statistics(x, even))
        weights = self.conv(self.tdnn(torch.cat([x, mean, deviation], 1)).tanh()).softmax(2)
        return torch.cat(_statistics(x, weights), 1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, variance.clamp(min=_LEAST_VARIANCE).sqrt()


class SpeakerEncoder(Node):
    """Clips to vectors, each by itself; float32 always. Clips have at least :data:`LEAST_SAMPLES` samples."""

    def __init__(self, config: SpeakerConfig):
        super().__init__()
        self.log_mel = _LogMel(config.mels, config.rate)
        channels = config.channels
        first = _Tdnn(config.mels, channels[0], config.kernels[0], config.dilations[0])
        self.blocks = nn.ModuleList([first, *(_Block(config, index) for index in range(1, len(channels) - 1))])
        self.mfa = _Tdnn(channels[-1], channels[-1], config.kernels[-1], config.dilations[-1])
        self.asp = _Pooling(channels[-1], config.attention)
        self.fc = nn.Conv1d(2 * channels[-1], config.width, 1)

    def settle(self) -> None:
        """Nothing is computed from the weights."""

    def forward(self, step: Step, clip: Tensor) -> dict[str, Tensor]:
        """*clip*: float32 samples of all rows, one after the other, ``[N]``. Returns `voice` float32
        ``[rows, width]``."""
        return {"voice": torch.stack([self._voice(samples) for samples in torch.split(clip, list(step.lengths))])}

    def _voice(self, samples: Tensor) -> Tensor:
        x, outs = self.log_mel(samples).T[None], []
        for block in self.blocks:
            x = block(x)
            outs.append(x)
        voice: Tensor = self.fc(self.asp(self.mfa(torch.cat(outs[1:], 1))))
        return voice[0, :, 0]


def speaker_weights(module: SpeakerEncoder) -> WeightMap:
    """The map of *module*, which lies beside the talker."""
    return WeightMap.from_module(module, {"": "speaker_encoder."}, ignore=(r"talker\..*",), float32=(".*",))
