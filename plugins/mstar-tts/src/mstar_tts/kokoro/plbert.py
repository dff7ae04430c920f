"""PL-BERT: an ALBERT over phonemes, whose one layer is applied many times.

References: ``transformers`` 5.24 (``AlbertModel``), which ``kokoro`` 0.9.4 builds on; Lan et al., 2020; Li et al.,
2023.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear, MergedLinear
from mstar_tts.kokoro.config import AlbertConfig

__all__ = ["PLBert"]


class _Embeddings(nn.Module):
    def __init__(self, config: AlbertConfig, tokens: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(tokens, config.embedding)
        self.position_embeddings = nn.Embedding(config.positions, config.embedding)
        self.token_type_embeddings = nn.Embedding(2, config.embedding)
        self.LayerNorm = nn.LayerNorm(config.embedding, config.eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings.weight[0]
        out: Tensor = self.LayerNorm(x + self.position_embeddings.weight[: ids.shape[1]])
        return out


class _Attention(nn.Module):
    def __init__(self, config: AlbertConfig):
        super().__init__()
        self.heads = config.heads
        self.qkv = MergedLinear(config.hidden, dict.fromkeys(("query", "key", "value"), config.hidden), bias=True)
        self.dense = Linear(config.hidden, config.hidden, bias=True)
        self.LayerNorm = nn.LayerNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        out: Tensor = self.LayerNorm(x + self.dense(seen.transpose(1, 2).reshape(rows, length, width)))
        return out


class _Layer(nn.Module):
    def __init__(self, config: AlbertConfig):
        super().__init__()
        self.attention = _Attention(config)
        self.ffn = Linear(config.hidden, config.intermediate, bias=True)
        self.ffn_output = Linear(config.intermediate, config.hidden, bias=True)
        self.full_layer_layer_norm = nn.LayerNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.attention(x, visible)
        out: Tensor = self.full_layer_layer_norm(x + self.ffn_output(F.gelu(self.ffn(x), approximate="tanh")))
        return out


class _Group(nn.Module):
    def __init__(self, config: AlbertConfig):
        super().__init__()
        self.albert_layers = nn.ModuleList([_Layer(config)])


class _Encoder(nn.Module):
    def __init__(self, config: AlbertConfig):
        super().__init__()
        self.times = config.layers
        self.embedding_hidden_mapping_in = Linear(config.embedding, config.hidden, bias=True)
        self.albert_layer_groups = nn.ModuleList([_Group(config)])

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        x = self.embedding_hidden_mapping_in(x)
        layer: _Layer = self.albert_layer_groups[0].albert_layers[0]  # type: ignore[index,assignment]
        for _ in range(self.times):
            x = layer(x, visible)
        return x


class PLBert(nn.Module):
    """int64 ids ``[rows, T]`` and a bool mask ``[rows, T]`` of valid ones to ``[rows, T, hidden]``."""

    def __init__(self, config: AlbertConfig, tokens: int):
        super().__init__()
        self.embeddings = _Embeddings(config, tokens)
        self.encoder = _Encoder(config)

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embeddings(ids), valid[:, None, None])
        return out
