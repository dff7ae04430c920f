"""The transformers of the codec's two halves: attention to what came before, and learnt scales on what the layers add.

References: ``qwen_tts`` 0.1.1 (decoder), ``transformers`` 4.57.3's Mimi (encoder). Layer scale: Touvron et al., 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.config import RopeConfig
from mstar.nn.decoder import GatedMLP
from mstar.nn.linear import Linear, QKVLinear
from mstar.nn.norm import RMSNorm
from mstar.nn.rotary import Rotary, Rotation
from mstar_tts.qwen3_tts.codec_config import TransformerConfig

__all__ = ["DecoderLayer", "EncoderLayer", "Mask", "causal_mask", "rotary", "window_mask"]


class Mask:
    """Which items each one sees, and where they are: the same for all layers.

    :param rotation: of the new items of all rows, one row after the other.
    :param seen: bool ``[rows or 1, 1, T, P + T]``: which of *P* items before and *T* new ones each new one sees.
    """

    def __init__(self, rotation: Rotation, seen: Tensor):
        self.rotation, self.seen = rotation, seen


def window_mask(rotary: Rotary, done: Tensor, count: int, window: int, dtype: torch.dtype) -> Mask:
    """Of rows that have had *done* items (int64 ``[rows]``) and get *count* more, each of which sees *window*, itself
    included. Of the items before, the last ``window - 1`` are there."""
    new = torch.arange(count, device=done.device)
    positions = (done[:, None] + new).flatten()
    before = window - 1
    places = torch.arange(-before, count, device=done.device)
    distance = new[:, None] - places
    near = (distance >= 0) & (distance <= before)
    there = places >= -done[:, None]
    return Mask(rotary(positions, dtype), near & there[:, None, None, :])


def causal_mask(rotary: Rotary, count: int, device: torch.device, dtype: torch.dtype) -> Mask:
    """Of one row of *count* items, each of which sees itself and all before it."""
    places = torch.arange(count, device=device)
    return Mask(rotary(places, dtype), places[:, None] >= places)


class _Attention(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.qkv_proj = QKVLinear(config.hidden, config.heads, config.kv_heads, config.head_dim, config.bias)
        self.o_proj = Linear(config.heads * config.head_dim, config.hidden, config.bias)

    def forward(self, x: Tensor, mask: Mask, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """*x* ``[rows, T, hidden]``; *past* ``[rows, 2, P, kv_heads, head_dim]``: keys, rotated, and values of the
        items before. Returns what the layer adds and keys and values with the new ones behind."""
        rows, count, _ = x.shape
        heads = self.qkv_proj(x.flatten(0, 1)).view(rows * count, -1, self.head_dim)
        turning = self.heads + self.kv_heads
        v = heads[:, turning:].clone()
        turned = mask.rotation.apply(heads, turning)
        q = turned[:, : self.heads].view(rows, count, self.heads, self.head_dim)
        new = torch.stack([turned[:, self.heads :], v], 1).view(rows, count, 2, self.kv_heads, self.head_dim)
        kv = new.transpose(1, 2)
        if past is not None:
            kv = torch.cat([past.to(kv.dtype), kv], 2)
        keys, values = kv[:, 0].transpose(1, 2), kv[:, 1].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, mask.seen, enable_gqa=self.heads != self.kv_heads
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), kv


class _Scale(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Layer(nn.Module):
    """Pre-norm attention and MLP, each with a scale."""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.self_attn = _Attention(config)
        self.self_attn_layer_scale = _Scale(config.hidden)
        self.mlp_layer_scale = _Scale(config.hidden)

    def forward(self, x: Tensor, mask: Mask, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """As the attention's, but for the whole layer."""
        added, kv = self.self_attn(_flat(self.input_layernorm, x), mask, past)
        x = x + self.self_attn_layer_scale(added)
        return x + self.mlp_layer_scale(_flat(self.mlp, _flat(self.post_attention_layernorm, x))), kv


def _flat(module: nn.Module, x: Tensor) -> Tensor:
    """*module*, which wants ``[N, hidden]``, of *x* ``[rows, T, hidden]``."""
    y: Tensor = module(x.flatten(0, 1))
    return y.view(*x.shape[:2], -1)


class DecoderLayer(_Layer):
    """A layer between codes and sound."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.intermediate)


class _PlainMLP(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.fc1 = Linear(config.hidden, config.intermediate)
        self.fc2 = Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


class EncoderLayer(_Layer):
    """A layer between sound and codes."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.input_layernorm = nn.LayerNorm(config.hidden, config.eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = _PlainMLP(config)


def rotary(config: TransformerConfig) -> Rotary:
    """Positions of *config*'s layers."""
    return Rotary(config.head_dim, RopeConfig(theta=config.theta))
