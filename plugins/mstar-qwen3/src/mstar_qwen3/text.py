"""The language model's worker side: graph, resources and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from mstar.nn.config import DecoderConfig, read_config
from mstar.nn.model import BuildContext
from mstar.nn.node import Node
from mstar.nn.ops import delta
from mstar.patterns.causal_lm import CausalLM
from mstar.spec.graph import Graph
from mstar.spec.resources import PagedKV, Positions, RecurrentState, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_qwen3.config import Qwen35Config
from mstar_qwen3.decoder import Qwen35Node

__all__ = ["Qwen35Text"]

_FLOAT32 = (
    r".*\.(input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight",
    r"model\.norm\.weight",
    r".*\.(A_log|dt_bias)",
)
"""Norms whose weight is an offset, and what decays a state: exponents of exponents."""


class Qwen35Text(CausalLM):
    """A causal language model with keys and values in a quarter of its layers, and a state in the others."""

    ignore = (r"mtp\..*", r"model\.visual\..*")
    node_class: ClassVar[type[Qwen35Node]] = Qwen35Node

    def __init__(self, context: BuildContext):
        self.sizes = Qwen35Config.from_hf(read_config(context.weights))
        super().__init__(context)

    def decoder_config(self) -> DecoderConfig:
        """What the pattern asks: *layers* are those with keys and values."""
        text = self.sizes.text
        return DecoderConfig(
            vocab=text.vocab,
            hidden=text.hidden,
            layers=len(text.full_layers),
            heads=text.heads,
            kv_heads=text.kv_heads,
            head_dim=text.head_dim,
            intermediate=text.intermediate,
            max_positions=text.max_positions,
            norm_eps=text.norm_eps,
            rope=text.rope,
            tied=text.tied,
            qk_norm=True,
        )

    def graph(self) -> Graph:
        plain = super().graph()
        (llm,) = plain.nodes
        (forward,) = llm.entries
        forward = replace(forward, resources=("kv", "positions", "gdn_state", "sampler"))
        return replace(plain, nodes=(replace(llm, entries=(forward,)),))

    def resources(self) -> Mapping[str, ResourceSpec]:
        text, plain = self.sizes.text, super().resources()
        kv = plain["kv"]
        assert isinstance(kv, PagedKV)
        state = RecurrentState(
            tensors={
                "conv": ((text.channels, text.kernel - 1), "model"),
                "delta": ((text.value_heads, text.key_dim, text.value_dim), "state"),
            },
            layers=len(text.linear_layers),
            state_dtype=text.state_dtype,
            page=kv.page_size,
            checkpoints=None,
            heads={"conv": 0, "delta": 0},
        )
        return {**plain, "positions": Positions(axes=3, prompt="positions"), "gdn_state": state}

    def build(self, node: str) -> Node:
        return self.node_class(self.sizes.text, self.context.dtype)

    def weights(self, node: str) -> WeightMap:
        with torch.device("meta"):
            module = self.build(node)
        rename = {} if self.sizes.text_layout else {"model.": "model.language_model."}
        return WeightMap.from_module(module, rename=rename, ignore=self.ignore, float32=_FLOAT32)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Qwen35Node):
            module.arrange()
            delta.prepare(self.context.device)
