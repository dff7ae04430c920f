"""Whisper's encoder: a window of sound to 1500 vectors, one for each 20 ms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import ColumnLinear, QKVLinear, RowLinear
from mstar.nn.node import Node, Step
from mstar.nn.norm import LayerNorm
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

    def beside(self, x: Tensor, normed: Tensor, positions: int) -> Tensor | None:
        """Add what is mixed from *normed* ``[rows * positions, hidden]``, windows one after the other, to the stream
        *x*; see :class:`_Layer`."""
        heads = self.qkv_proj(normed).unflatten(-1, (3, self.heads, -1)).unflatten(0, (-1, positions))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = attend_windows(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        return self.out_proj.add_to(x, mixed)


class _Layer(nn.Module):
    """Blocks beside the stream. What a block adds to it is handed on as *delta* and added within the next norm, or was
    added by its last product (:meth:`mstar.nn.linear.Linear.add_to`), and there is no *delta*."""

    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(config.hidden)
        self.self_attn = _Attention(config.hidden, config.encoder_heads)
        self.final_layer_norm = LayerNorm(config.hidden)
        self.fc1 = ColumnLinear(config.hidden, config.encoder_ffn, bias=True)
        self.fc2 = RowLinear(config.encoder_ffn, config.hidden, bias=True)

    def forward(self, x: Tensor, delta: Tensor | None, positions: int) -> Tensor | None:
        """*x*: the stream ``[rows * positions, hidden]``, changed in place."""
        delta = self.self_attn.beside(x, self.self_attn_layer_norm(x, delta), positions)
        delta = self.fc2.add_to(x, F.gelu(self.fc1(self.final_layer_norm(x, delta))))
        if x.dtype is torch.float16:  # the reference keeps its stream in range so
            limit = torch.finfo(x.dtype).max - 1000
            (x if delta is None else x.add_(delta)).clamp_(-limit, limit)
            return None
        return delta


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
        self.layer_norm = LayerNorm(config.hidden)

    def forward(self, step: Step, samples: Tensor, frames: Tensor, loudest: Tensor) -> dict[str, Tensor]:
        """Entry ``forward``; inputs as :meth:`LogMel.forward`'s. Returns ``memory`` ``[rows, 1500, hidden]``."""
        return {"memory": self.encode(self.log_mel(samples, frames, loudest))}

    def encode(self, features: Tensor) -> Tensor:
        """*features* float32 ``[rows, mels, 3000]`` → ``[rows, 1500, hidden]``."""
        x = F.gelu(self.conv1(features.to(self.conv1.weight.dtype)))
        # contiguous: a sum takes its layout from what is summed, and so would each layer's
        x = F.gelu(self.conv2(x)).transpose(1, 2).contiguous() + self.embed_positions.weight
        rows, positions, _ = x.shape
        stream = x.flatten(0, 1)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(stream, delta, positions)
        return self.layer_norm(stream, delta).view(rows, positions, -1)  # type: ignore[no-any-return]
