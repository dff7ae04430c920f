"""The layers of a decoder-only transformer of the Llama kind. Differences between families are flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.config import DecoderConfig
from mstar.nn.linear import MergedLinear, QKVLinear, RowLinear, VocabEmbedding
from mstar.nn.moe import MoE
from mstar.nn.norm import RMSNorm
from mstar.nn.rotary import Rotary, Rotation

__all__ = ["Attention", "DecoderLayer", "DecoderStack", "GatedMLP"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020), gate and up in one product. *x* ``[N, hidden]``."""

    def __init__(self, hidden: int, intermediate: int, activation: str = "silu", bias: bool = False):
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden, {"gate_proj": intermediate, "up_proj": intermediate}, bias)
        self.down_proj = RowLinear(intermediate, hidden, bias)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._activated(self.gate_up_proj(x)))  # type: ignore[no-any-return]

    def beside(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor | None:
        """``self(norm(x, delta))`` for the stream *x*; see :class:`DecoderLayer`."""
        layer, hidden = self.gate_up_proj, None
        if delta is None and layer.product is None and self.activation is F.silu:
            hidden = ops.norm_gate_up(x, norm.weight, norm.eps, layer.weight, layer.bias, layer.deterministic)
        if hidden is None:
            hidden = self._activated(layer.after(norm, x, delta))
        return self.down_proj.add_to(x, hidden)

    def _activated(self, gate_up: Tensor) -> Tensor:
        if self.activation is F.silu:
            return ops.silu_mul(gate_up, self.down_proj.weight)
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate).mul_(up)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads and rotary positions.

    Under tensor parallelism a rank has some of the heads, and the resource has theirs.

    Keys and values live in the step's KV resource, whose view has ``attend_heads(layer, heads, q_heads, rotation,
    norms)`` for the packed ``[N, heads, head_dim]`` of queries, keys and values; sliding windows are the resource's,
    per layer.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.qkv_proj = QKVLinear(config.hidden, config.heads, config.kv_heads, config.head_dim, config.qkv_bias)
        self.heads, self.kv_heads = self.qkv_proj.heads, self.qkv_proj.kv_heads
        self.o_proj = RowLinear(config.heads * config.head_dim, config.hidden, config.o_bias, unit=config.head_dim)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, kv: Any) -> Tensor:
        """*x*: normed ``[N, hidden]``."""
        return self.o_proj(self._mixed(self.qkv_proj(x), rotation, kv))  # type: ignore[no-any-return]

    def beside(self, x: Tensor, delta: Tensor | None, norm: RMSNorm, rotation: Rotation, kv: Any) -> Tensor | None:
        """``self(norm(x, delta), …)`` for the stream *x*; see :class:`DecoderLayer`."""
        return self.o_proj.add_to(x, self._mixed(self.qkv_proj.after(norm, x, delta), rotation, kv))

    def _mixed(self, qkv: Tensor, rotation: Rotation, kv: Any) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        norms: ops.HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = ops.HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        mixed: Tensor = kv.attend_heads(self.layer, heads, self.heads, rotation, norms)
        return mixed.flatten(1)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP beside a residual stream.

    What a block adds to the stream is handed on as *delta* and added within the next norm, which reads the stream too;
    or its last product adds it (:meth:`mstar.nn.linear.Linear.add_to`), and there is no *delta*.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        moe = config.moe
        self.mlp: GatedMLP | MoE
        if moe is not None and layer in moe.layers:
            self.mlp = MoE(config.hidden, moe.intermediate, moe.experts, moe.active, moe.normalized)
        else:
            self.mlp = GatedMLP(config.hidden, config.intermediate, config.activation, config.mlp_bias)

    def forward(self, x: Tensor, delta: Tensor | None, rotation: Rotation, kv: Any) -> Tensor | None:
        """*x*: the stream ``[N, hidden]``; *delta*, which is still to be added, is added to it in place.

        :returns: what is still to be added of this layer's MLP, for the next norm.
        """
        delta = self.self_attn.beside(x, delta, self.input_layernorm, rotation, kv)
        return self.mlp.beside(x, delta, self.post_attention_layernorm)


class DecoderStack(nn.Module):
    """Embedding, layers and final norm. Submodules bear the published names, so that weights map by name.

    The final norm is left to the caller: only the positions whose logits are wanted need it.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope)

    def forward(self, x: Tensor, positions: Tensor, kv: Any) -> Tensor:
        """*x*: embedded tokens ``[N, hidden]``, overwritten. *positions*: integers ``[N]``.

        :returns: the residual stream ``[N, hidden]``: on the CPU in float32, which costs nothing there and spares the
            stream its rounding; elsewhere in the model's dtype.
        """
        rotation = self.rotary(positions, x.dtype)
        if x.is_cpu:
            x = x.float()
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, rotation, kv)
        return x if delta is None else x.add_(ops.whole(delta, x))
