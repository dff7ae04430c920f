"""Whisper's encoder: a window of sound to 1500 vectors, one for each 20 ms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import ColumnLinear, QKVLinear, RowLinear
from mstar.nn.node import Node, Step
from mstar.nn.windows import attend_windows
from mstar_asr.whisper.config import WhisperConfig
from mstar_asr.whisper.features import LogMel

__all__ = ["Encoder"]


class _Attention(nn.Module):
    """All positions of a window see each other."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.qkv_proj = QKVLinear(hidden, heads, heads, hidden // heads, bias=("q_proj", "v_proj"))
        self.heads = self.qkv_proj.heads
        self.out_proj = RowLinear(hidden, hidden, bias=True, unit=hidden // heads)

    def forward(self, x: Tensor) -> Tensor:
        """*x*: normed ``[rows, positions, hidden]``."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = attend_windows(q, k, v).transpose(1, 2).flatten(2)
        return self.out_proj(mixed)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden)
        self.self_attn = _Attention(config.hidden, config.encoder_heads)
        self.final_layer_norm = nn.LayerNorm(config.hidden)
        self.fc1 = ColumnLinear(config.hidden, config.encoder_ffn, bias=True)
        self.fc2 = RowLinear(config.encoder_ffn, config.hidden, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        x = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        if x.dtype is torch.float16:  # the reference keeps its stream in range so
            limit = torch.finfo(x.dtype).max - 1000
            x = x.clamp(-limit, limit)
        return x


class Encoder(Node):
    """Spectrogram, two convolutions and transformer layers. Every window has the same length, so a step of so many
    windows is the same sequence of operations each time and can be captured."""

    tensor_parallel = True

    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.log_mel = LogMel(config.mels)
        self.conv1 = nn.Conv1d(config.mels, config.hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(config.hidden, config.hidden, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.SOURCE_POSITIONS, config.hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.hidden)

    def forward(self, step: Step, samples: Tensor, frames: Tensor, loudest: Tensor) -> dict[str, Tensor]:
        """Entry ``forward``; inputs as :meth:`LogMel.forward`'s. Returns ``memory`` ``[rows, 1500, hidden]``."""
        return {"memory": self.encode(self.log_mel(samples, frames, loudest))}

    def encode(self, features: Tensor) -> Tensor:
        """*features* float32 ``[rows, mels, 3000]`` → ``[rows, 1500, hidden]``."""
        x = F.gelu(self.conv1(features.to(self.conv1.weight.dtype)))
        # contiguous: a sum takes its layout from what is summed, and so would each layer's
        x = F.gelu(self.conv2(x)).transpose(1, 2).contiguous() + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)  # type: ignore[no-any-return]
