"""The language model: layers of both kinds beside one residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.decoder import GatedMLP
from mstar.nn.linear import LMHead, VocabEmbedding
from mstar.nn.node import Step
from mstar.nn.norm import OffsetRMSNorm
from mstar.nn.ops.delta import Spans
from mstar.nn.rotary import Rotation
from mstar.patterns.causal_lm import CausalLMNode
from mstar_qwen3.attention import GatedAttention
from mstar_qwen3.config import TextConfig
from mstar_qwen3.deltanet import GatedDeltaNet
from mstar_qwen3.rotary import PartialRotary

__all__ = ["Qwen35Node", "Qwen35Stack"]


class AttentionLayer(nn.Module):
    """Attention and MLP, pre-norm. What is still to be added to the stream goes along as in
    :class:`mstar.nn.decoder.DecoderLayer`."""

    def __init__(self, config: TextConfig, index: int, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = OffsetRMSNorm(config.hidden, config.norm_eps, dtype)
        self.self_attn = GatedAttention(config, index, dtype)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden, config.norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden, config.intermediate)

    def forward(
        self, x: Tensor, delta: Tensor | None, rotation: Rotation, spans: Spans, kv: Any, state: Any
    ) -> Tensor | None:
        delta = self.self_attn.beside(x, delta, self.input_layernorm, rotation, kv)
        return self.mlp.beside(x, delta, self.post_attention_layernorm)


class DeltaLayer(nn.Module):
    """A gated delta net and MLP, pre-norm."""

    def __init__(self, config: TextConfig, index: int, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = OffsetRMSNorm(config.hidden, config.norm_eps, dtype)
        self.linear_attn = GatedDeltaNet(config, index)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden, config.norm_eps, dtype)
        self.mlp = GatedMLP(config.hidden, config.intermediate)

    def forward(
        self, x: Tensor, delta: Tensor | None, rotation: Rotation, spans: Spans, kv: Any, state: Any
    ) -> Tensor | None:
        delta = self.linear_attn.beside(x, delta, self.input_layernorm, spans, state)
        return self.mlp.beside(x, delta, self.post_attention_layernorm)


class Qwen35Stack(nn.Module):
    """Embedding, layers and final norm, which is left to the caller as in :class:`mstar.nn.decoder.DecoderStack`."""

    def __init__(self, config: TextConfig, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList()
        attending = with_state = 0
        for kind in config.kinds:
            if kind == "full_attention":
                self.layers.append(AttentionLayer(config, attending, dtype))
                attending += 1
            else:
                self.layers.append(DeltaLayer(config, with_state, dtype))
                with_state += 1
        self.norm = OffsetRMSNorm(config.hidden, config.norm_eps, dtype)
        self.rotary = PartialRotary(config)

    def forward(self, x: Tensor, positions: Tensor, spans: Spans, kv: Any, state: Any) -> Tensor:
        """*x*: embedded tokens ``[N, hidden]``, overwritten. *positions*: integers ``[3, N]``.

        :returns: the residual stream ``[N, hidden]``, on the CPU in float32.
        """
        rotation = self.rotary(positions, x.dtype)
        if x.is_cpu:
            x = x.float()
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, rotation, spans, kv, state)
        return x if delta is None else x.add_(ops.whole(delta, x))


class Qwen35Node(CausalLMNode):
    """Packed ids in, one sampled token per row out. Uses ``kv``, ``positions``, ``gdn_state`` and ``sampler``."""

    batch_invariant = False  # chunks of a prompt are summed up differently in other steps
    tensor_parallel = True

    def __init__(self, config: TextConfig, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.model: Qwen35Stack = Qwen35Stack(config, dtype)  # type: ignore[assignment]  # of another kind
        self.lm_head = LMHead(config.hidden, config.vocab, tied=self.model.embed_tokens if config.tied else None)

    def embed(self, step: Step, ids: Tensor) -> Tensor:
        """*ids* int64 ``[N]`` → ``[N, hidden]``, which the layers may overwrite."""
        return self.model.embed_tokens(ids)  # type: ignore[no-any-return]

    def hidden(self, step: Step, ids: Tensor) -> Tensor:
        spans = Spans(step.offsets, ids.shape[0])
        return self.model(  # type: ignore[no-any-return]
            self.embed(step, ids), step["positions"].positions, spans, step["kv"], step["gdn_state"]
        )

    def arrange(self) -> None:
        """Published weights as the layers compute with them. Once, after loading."""
        for module in self.modules():
            if isinstance(module, GatedAttention):
                module.arrange()
            elif isinstance(module, OffsetRMSNorm):
                module.add_one()
