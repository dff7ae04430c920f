"""A tiny language model with a layer that attends and a gated delta net, divided among ranks by their heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mstar.nn.decoder import DecoderLayer
from mstar.nn.linear import ColumnWeight, LMHead, MergedLinear, RowLinear, VocabEmbedding
from mstar.nn.mesh import current_mesh
from mstar.nn.node import Step
from mstar.nn.norm import RMSNorm
from mstar.nn.ops import delta as delta_ops
from mstar.nn.rotary import Rotary
from mstar.nn.shards import Cut, Division, Part, shares
from mstar.patterns.causal_lm import CausalLM, CausalLMNode
from mstar.spec.graph import Graph
from mstar.spec.resources import RecurrentState, ResourceSpec

KEY_HEADS, VALUE_HEADS, KEY, VALUE, TAPS = 4, 8, 4, 6, 3
SECTIONS = (KEY_HEADS * KEY, KEY_HEADS * KEY, VALUE_HEADS * VALUE)


class DeltaNet(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        tp, inner = current_mesh().tp, VALUE_HEADS * VALUE
        self.divisions = (Division("key heads", KEY_HEADS), Division("value heads", VALUE_HEADS))
        self.in_proj = MergedLinear(
            hidden, {"in_proj_qkv": SECTIONS, "in_proj_z": inner, "in_proj_b": VALUE_HEADS, "in_proj_a": VALUE_HEADS}
        )
        self.conv1d = ColumnWeight(sum(SECTIONS), (1, TAPS), sections=SECTIONS)
        self._cut = Cut(0, VALUE_HEADS, shares((VALUE_HEADS,), tp))
        self.heads = self._cut.length
        self.A_log = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.norm = RMSNorm(VALUE)
        self.out_proj = RowLinear(inner, hidden, unit=VALUE)

    def published_parts(self, name: str) -> Iterator[Part]:
        yield Part("", cut=None if self._cut.whole else self._cut)

    def forward(self, x: Tensor, spans: delta_ops.Spans, state: Any) -> Tensor:
        mixed, z, b, a = torch.split(self.in_proj(x), list(self.in_proj.widths.values()), 1)
        taps = self.conv1d.weight.squeeze(1)
        slots = state.slots("conv"), state.slots("delta")
        out = delta_ops.gated_delta_net(mixed, a, b, taps, self.A_log, self.dt_bias, spans, *slots)
        gate = z.view(z.shape[0], self.heads, VALUE)
        normed = delta_ops.gated_rms_norm(out, gate, self.norm.weight, self.norm.eps)
        return self.out_proj(normed.flatten(1))  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab, config.hidden)
        self.attending = DecoderLayer(config, 0)
        self.input_norm, self.linear_attn = RMSNorm(config.hidden), DeltaNet(config.hidden)
        self.norm = RMSNorm(config.hidden)
        self.rotary = Rotary(config.head_dim, config.rope)


class HybridNode(CausalLMNode):
    tensor_parallel = True

    def __init__(self, config: Any):
        nn.Module.__init__(self)
        self.model = Layers(config)  # type: ignore[assignment]
        self.lm_head = LMHead(config.hidden, config.vocab)

    def hidden(self, step: Step, ids: Tensor) -> Tensor:
        layers: Any = self.model
        x = layers.embed_tokens(ids)
        rotation = layers.rotary(step["positions"].positions, x.dtype)
        delta = layers.attending(x, None, rotation, step["kv"])
        x = x if delta is None else x + delta
        spans = delta_ops.Spans(step.offsets, ids.shape[0])
        return x + layers.linear_attn(layers.input_norm(x), spans, step["state"])  # type: ignore[no-any-return]


class HybridLM(CausalLM):
    node_class: ClassVar[type[CausalLMNode]] = HybridNode

    def graph(self) -> Graph:
        graph = super().graph()
        (node,) = graph.nodes
        (entry,) = node.entries
        entry = replace(entry, resources=(*entry.resources, "state"))
        return replace(graph, nodes=(replace(node, entries=(entry,)),))

    def resources(self) -> Mapping[str, ResourceSpec]:
        tensors = {
            "conv": ((sum(SECTIONS), TAPS - 1), "model"),
            "delta": ((VALUE_HEADS, KEY, VALUE), "state"),
        }
        return {**super().resources(), "state": RecurrentState(tensors, heads={"conv": 0, "delta": 0})}
