"""How long each phoneme lasts, and the pitch and loudness of each frame, as a style has it.

Reference: ``kokoro`` 0.9.4 (``modules.py``: ``ProsodyPredictor``, ``DurationEncoder``; ``model.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.nn.linear import Linear
from mstar_tts.kokoro.adaptive import AdaLayerNorm, StyleBlock
from mstar_tts.kokoro.layers import BiLSTM, Conv, keep

__all__ = ["Durations", "PitchAndEnergy", "align"]


def _with_style(x: Tensor, style: Tensor, lengths: Tensor) -> Tensor:
    return keep(torch.cat([x, style[:, None].expand(-1, x.shape[1], -1)], 2), lengths)


class _Encoder(nn.Module):
    """LSTMs and norms in turn; the style is joined to the input of each. Returns ``[rows, T, hidden + style]``."""

    def __init__(self, hidden: int, style: int, layers: int):
        super().__init__()
        self.lstms = nn.ModuleList(
            module
            for _ in range(layers)
            for module in (BiLSTM(hidden + style, hidden // 2), AdaLayerNorm(style, hidden))
        )

    def forward(self, x: Tensor, style: Tensor, lengths: Tensor) -> Tensor:
        x = _with_style(x, style, lengths)
        for lstm, norm in zip(self.lstms[::2], self.lstms[1::2], strict=True):
            x = _with_style(norm(lstm(x, lengths), style), style, lengths)
        return x


class _Projection(nn.Module):
    def __init__(self, hidden: int, most: int):
        super().__init__()
        self.linear_layer = Linear(hidden, most, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_layer(x)
        return out


class Durations(nn.Module):
    """Frames of each phoneme. *x* ``[rows, T, hidden]``, *style* ``[rows, style]``, *speed* ``[rows]``.

    Returns what pitch and energy are predicted from, ``[rows, T, hidden + style]``, and int64 ``[rows, T]`` frames: one
    or more for each valid phoneme, 0 beyond the lengths. Halves are rounded to even.
    """

    def __init__(self, hidden: int, style: int, layers: int, most: int):
        super().__init__()
        self.text_encoder = _Encoder(hidden, style, layers)
        self.lstm = BiLSTM(hidden + style, hidden // 2)
        self.duration_proj = _Projection(hidden, most)

    def forward(self, x: Tensor, style: Tensor, speed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        features = self.text_encoder(x, style, lengths)
        logits = self.duration_proj(self.lstm(features, lengths))
        frames = torch.round(torch.sigmoid(logits).sum(2) / speed[:, None]).clamp(min=1).long()
        return features, keep(frames, lengths)


def align(features: Tensor, frames: Tensor, total: int, length: int) -> Tensor:
    """Of one row: each phoneme's *features* ``[T, channels]`` repeated for its *frames* (int64 ``[T]``, *total* in all:
    a device that has to say it first would be waited for). Returns ``[length, channels]``, zero beyond the frames."""
    spoken = features.repeat_interleave(frames, 0, output_size=total)
    return torch.cat([spoken, spoken.new_zeros(length - total, spoken.shape[1])])


class PitchAndEnergy(nn.Module):
    """*x* ``[rows, F, hidden + style]`` to pitch in Hz and loudness, each ``[rows, 2 * F]``, zero beyond twice the
    lengths."""

    def __init__(self, hidden: int, style: int):
        super().__init__()
        self.shared = BiLSTM(hidden + style, hidden // 2)
        self.F0, self.N = self._blocks(hidden, style), self._blocks(hidden, style)
        self.F0_proj, self.N_proj = (Conv(hidden // 2, 1, 1, normed=False) for _ in range(2))

    @staticmethod
    def _blocks(hidden: int, style: int) -> nn.ModuleList:
        half = hidden // 2
        sizes = ((hidden, hidden, False), (hidden, half, True), (half, half, False))
        return nn.ModuleList(StyleBlock(a, b, style, double) for a, b, double in sizes)

    def forward(self, x: Tensor, style: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.shared(x, lengths)
        return (
            self._curve(x, self.F0, self.F0_proj, style, lengths),
            self._curve(x, self.N, self.N_proj, style, lengths),
        )

    def _curve(self, x: Tensor, blocks: nn.ModuleList, last: Conv, style: Tensor, lengths: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, lengths, style)
            lengths = 2 * lengths if block.doubles else lengths
        return keep(last(x)[:, :, 0], lengths)
