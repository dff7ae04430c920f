"""The causal language model: a prompt goes in, tokens come out one by one.

A family of this pattern states facts only. If its decoder is of the Llama kind and its weights bear the usual names, an
empty subclass of :class:`CausalLM` is the whole worker side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from mstar.nn.config import DecoderConfig, read_config
from mstar.nn.decoder import DecoderStack
from mstar.nn.linear import LMHead
from mstar.nn.model import BuildContext, Demand, Model
from mstar.nn.node import Node, Sampled, Step
from mstar.patterns.shapes import context_length
from mstar.spec.graph import CLIENT, Call, Entry, Graph, Loop, NodeSpec, Partition, Port, Seq, Stream, TokenStop
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import PagedKV, Positions, ResourceSpec, Sampler
from mstar.weights.names import WeightMap

__all__ = ["CausalLM", "CausalLMNode"]


class CausalLMNode(Node):
    """Packed ids in, one sampled token per row out. Uses ``kv``, ``positions`` and ``sampler``."""

    batch_invariant = True
    tensor_parallel = True

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.model = DecoderStack(config)
        self.lm_head = LMHead(config.hidden, config.vocab, tied=self.model.embed_tokens if config.tied else None)

    def hidden(self, step: Step, ids: Tensor) -> Tensor:
        """*ids* int64 ``[N]`` → the residual stream after the last layer ``[N, hidden]``, not normalised yet."""
        return self.model(  # type: ignore[no-any-return]
            self.model.embed_tokens(ids), step["positions"].positions, step["kv"]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, hidden]`` → ``[M, vocab]``."""
        return self.lm_head.after(self.model.norm, hidden, None)

    def forward(self, step: Step, ids: Tensor) -> Mapping[str, Sampled]:
        """Entry ``forward``."""
        return self.sample(step, self.hidden(step, ids))

    def sample(self, step: Step, hidden: Tensor) -> Mapping[str, Sampled]:
        """*hidden* ``[N, hidden]`` → a token a row. Only each row's last position goes through the final norm and the
        head."""
        if hidden.shape[0] != step.rows:  # in pure decode every position is its row's last
            hidden = hidden[step.last]
        return {"token": step["sampler"].sample(self.logits(hidden))}


class CausalLM(Model):
    """Graph, resources and weights of a causal language model.

    :cvar ignore: published tensors that the node does not need, as regular expressions over whole names.
    :cvar rename: module prefix → published prefix, for decoders published inside a larger model.

    Its options are :class:`~mstar.spec.knobs.TextOptions`: ``max_tokens`` is the longest context served (default: the
    model's own).
    """

    ignore: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq",)
    rename: ClassVar[Mapping[str, str]] = {}
    node_class: ClassVar[type[CausalLMNode]] = CausalLMNode

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.config = self.decoder_config()
        self.max_tokens = context_length(context.options, self.config)

    def decoder_config(self) -> DecoderConfig:
        """All sizes, from the ``config.json`` beside the weights. Families whose config is nested override it."""
        return DecoderConfig.from_hf(read_config(self.context.weights))

    def graph(self) -> Graph:
        entry = Entry(
            inputs=(Port("ids", "int64", ("T",)),),
            outputs=(Port("token", "int64", (), "stacked"),),
            chunk="ids",
            resources=("kv", "positions", "sampler"),
            prefix=True,
        )
        prefill = Call("llm", inputs={"ids": "prompt"}, outputs={"token": "token"}, emit={"token": "text"})
        decode = replace(prefill, inputs={"ids": "token"})
        return Graph(
            nodes=(NodeSpec("llm", (entry,)),),
            walks={"generate": Seq(prefill, Loop(decode, until=TokenStop("token")))},
            partitions=(Partition("main", ("generate",)),),
            streams=(Stream("text", source="main", target=CLIENT),),
            inputs=(Port("prompt", "int64", ("T",)),),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        config = self.config
        return {
            "kv": PagedKV(
                layers=config.layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                query_heads=config.heads,
                max_tokens=self.max_tokens,
                windows=config.windows,
            ),
            "positions": Positions(),
            "sampler": Sampler(vocab=config.vocab),
        }

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        sampling = request.sampling.get("sampler", SamplingParams())
        return (Demand("kv", tokens=len(request.inputs["prompt"]) + sampling.max_tokens),)

    def build(self, node: str) -> Node:
        return self.node_class(self.config)

    def weights(self, node: str) -> WeightMap:
        with torch.device("meta"):
            module = self.build(node)
        return WeightMap.from_module(module, rename=self.rename, ignore=self.ignore)
