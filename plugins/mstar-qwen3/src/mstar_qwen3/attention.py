"""The layers that attend: grouped-query attention whose output each query head gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.linear import MergedLinear, RowLinear
from mstar.nn.norm import OffsetRMSNorm, RMSNorm
from mstar.nn.rotary import Rotation
from mstar.nn.shards import Division
from mstar_qwen3.config import TextConfig
from mstar_qwen3.rotary import head_order

__all__ = ["GatedAttention"]


class GatedAttention(nn.Module):
    """``o_proj(attend(q, k, v) * sigmoid(gate))``.

    ``q_proj`` is published with each head's gate behind its query. :meth:`arrange` puts the rows of the fused
    projection where the runtime's kernels read them: all queries, keys, values, and then the gates.

    :param index: which of the layers with keys and values it is.
    """

    def __init__(self, config: TextConfig, index: int, dtype: torch.dtype):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.rotary_dims = config.rotary_dims
        narrow = config.kv_heads * config.head_dim
        parts = {"q_proj": 2 * config.heads * config.head_dim, "k_proj": narrow, "v_proj": narrow}
        units = {"q_proj": 2 * config.head_dim, "k_proj": config.head_dim, "v_proj": config.head_dim}
        self.qkv_proj = MergedLinear(config.hidden, parts, unit=units)
        heads = Division("query heads", config.heads), Division("key-value heads", config.kv_heads, copied=True)
        self.qkv_proj.divisions = heads
        self.heads, self.kv_heads = (self.qkv_proj.widths[name] // units[name] for name in ("q_proj", "k_proj"))
        self.o_proj = RowLinear(config.heads * config.head_dim, config.hidden, unit=config.head_dim)
        self.q_norm = OffsetRMSNorm(config.head_dim, config.norm_eps, dtype)
        self.k_norm = OffsetRMSNorm(config.head_dim, config.norm_eps, dtype)

    def arrange(self) -> None:
        """From the published order of weights to the one that :meth:`beside` computes with. Once, after loading."""
        weight = self.qkv_proj.weight
        order = head_order(self.head_dim, self.rotary_dims).to(weight.device)
        rows = torch.arange(weight.shape[0], device=weight.device)
        published, keys, values = torch.split(rows, list(self.qkv_proj.widths.values()))
        queries, gates = published.view(self.heads, 2, self.head_dim).unbind(1)
        keys = keys.view(self.kv_heads, self.head_dim)
        wanted = torch.cat((queries[:, order].flatten(), keys[:, order].flatten(), values, gates.flatten()))
        weight.copy_(weight[wanted])
        for norm in (self.q_norm, self.k_norm):
            norm.weight.copy_(norm.weight[order])

    def beside(self, x: Tensor, delta: Tensor | None, norm: RMSNorm, rotation: Rotation, kv: Any) -> Tensor | None:
        """For the stream *x*; see :class:`mstar.nn.decoder.DecoderLayer`."""
        fused = self.qkv_proj.after(norm, x, delta)
        width = self.heads * self.head_dim
        heads = fused[:, : fused.shape[1] - width].view(fused.shape[0], -1, self.head_dim)
        norms = ops.HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        mixed: Tensor = kv.attend_heads(self.index, heads, self.heads, rotation, norms)
        return self.o_proj.add_to(x, ops.sigmoid_mul(mixed.flatten(1), fused[:, -width:]))
