"""The phonemes' features that the decoder speaks: convolutions and an LSTM.

Reference: ``kokoro`` 0.9.4 (``modules.py``, ``TextEncoder``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar_tts.kokoro.layers import BiLSTM, Conv, keep

__all__ = ["TextEncoder"]


class _Norm(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.gamma.shape, self.gamma, self.beta)


class TextEncoder(nn.Module):
    """int64 ids ``[rows, T]`` with lengths to ``[rows, T, channels]``, zero beyond the lengths."""

    def __init__(self, channels: int, kernel: int, depth: int, tokens: int):
        super().__init__()
        self.embedding = nn.Embedding(tokens, channels)
        self.cnn = nn.ModuleList(nn.Sequential(Conv(channels, channels, kernel), _Norm(channels)) for _ in range(depth))
        self.lstm = BiLSTM(channels, channels // 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = keep(self.embedding(ids), lengths)
        for layer in self.cnn:
            x = keep(F.leaky_relu(layer(x), 0.2), lengths)
        out: Tensor = self.lstm(x, lengths)
        return out
