"""Short-time Fourier transforms of padded rows, and back: those of ``torch.stft`` and ``torch.istft`` (centred,
periodic Hann window), as if each row had been alone.

For windows of a few samples a transform is little work; what matters is that a row's end is where its length says.
"""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar_tts.kokoro.layers import keep

__all__ = ["Spectrum"]


class Spectrum(nn.Module):
    """:param n_fft: samples of a window, a multiple of *hop*, the samples between two."""

    window: Tensor

    def __init__(self, n_fft: int, hop: int):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", self._hann("cpu"), persistent=False)

    def _hann(self, device: torch.device | str) -> Tensor:
        return torch.hann_window(self.n_fft, device=device)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        return {"window": self._hann(device)}

    def forward(self, sound: Tensor, lengths: Tensor) -> Tensor:
        """Magnitudes and then angles of *sound* ``[rows, S]``, of which ``lengths`` samples are valid (int64
        ``[rows]``, more than half a window, multiples of the hop): ``[rows, S / hop + 1, n_fft + 2]``, zero beyond
        ``lengths / hop + 1``."""
        half = self.n_fft // 2
        places = torch.arange(-half, sound.shape[1] + half, device=sound.device).abs()
        ends = lengths[:, None] - 1
        places = torch.where(places > ends, 2 * ends - places, places.expand(len(sound), -1))  # mirrored at both ends
        padded = sound.gather(1, places.clamp(min=0))
        frames = torch.fft.rfft(padded.unfold(1, self.n_fft, self.hop) * self.window)
        angles = frames.angle()
        # The first window is its own mirror image, so its transform is real; rounding would choose between π and -π.
        angles = torch.cat([torch.where(frames.real[:, :1] < 0, pi, 0.0), angles[:, 1:]], 1)
        return keep(torch.cat([frames.abs(), angles], 2), lengths // self.hop + 1)

    def inverse(self, magnitude: Tensor, angle: Tensor, lengths: Tensor) -> Tensor:
        """The sound ``[rows, (frames - 1) * hop]`` of *magnitude* and *angle* ``[rows, frames, n_fft / 2 + 1]``, of
        which ``lengths`` frames are valid."""
        frames = torch.fft.irfft(torch.polar(magnitude, angle), self.n_fft) * self.window
        frames = keep(frames, lengths)
        valid = keep(self.window.square().expand(*frames.shape[:2], -1), lengths)
        half = self.n_fft // 2
        sound, weight = self._overlap(frames), self._overlap(valid)
        sound, weight = sound[:, half:-half], weight[:, half:-half]
        return sound / torch.where(weight > 1e-11, weight, 1.0)

    def _overlap(self, frames: Tensor) -> Tensor:
        """The sum of the windows, each a hop after the one before it."""
        parts = frames.split(self.hop, 2)  # type: ignore[no-untyped-call]
        total = sum(F.pad(part, (0, 0, shift, len(parts) - 1 - shift)) for shift, part in enumerate(parts))
        assert isinstance(total, Tensor)
        return total.flatten(1)
