"""Encoder → decoder: an input is read once, then tokens come out one by one (speech recognition, translation).

::

    source → encoder → memory → decoder.prime       (cross keys and values, written once)
    start  → decoder → token ⟲ decoder → "text"     (self-attention KV grows, the memory is read)
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mstar.nn.model import Demand, Model
from mstar.patterns.shapes import DecoderShape, answer_tokens
from mstar.spec.graph import CLIENT, Call, Entry, Graph, Loop, NodeSpec, Partition, Port, Seq, Stream, TokenStop
from mstar.spec.request import EngineRequest
from mstar.spec.resources import CrossKV, Positions, RaggedAttention, ResourceSpec

__all__ = ["EncoderDecoder", "EncoderDecoderFacts"]

_IDS = Port("ids", "int64", ("T",))
_TOKEN = Port("token", "int64", (), "stacked")


@dataclass(frozen=True)
class EncoderDecoderFacts:
    """What a family of this pattern states.

    :param source: the request's input (features ``("F", 80)``, token ids ``("S",)``); the encoder's port has its name.
    :param memory: what the encoder makes of it, packed; named ``memory`` by custom.
    :param max_memory: the longest memory in positions. :param decoder: the decoder's sizes.
    :param attention: the encoder's attention, if it attends within its input: resource ``encoder_attention``.
    """

    source: Port
    memory: Port
    max_memory: int
    decoder: DecoderShape
    attention: RaggedAttention | None = None


class EncoderDecoder(Model):
    """Graph, resources and demand of an encoder with an autoregressive decoder. A family adds :meth:`facts`, the two
    modules in :meth:`build` and its weights.

    *Nodes.* ``encoder.forward(step, SOURCE) -> {MEMORY}`` with view ``encoder_attention`` if the facts name one.
    ``decoder.prime(step, MEMORY) -> {}`` writes each layer's keys and values to view ``cross``.
    ``decoder.forward(step, ids) -> {"token": Sampled}`` uses views ``kv``, ``positions``, ``cross`` and ``sampler``.

    *A request* brings SOURCE and ``start``, the decoder's first tokens (language and task tokens, a forced prefix).
    """

    @abc.abstractmethod
    def facts(self) -> EncoderDecoderFacts: ...

    def graph(self) -> Graph:
        facts = self.facts()
        source, memory = facts.source, facts.memory
        encoder = Entry(
            inputs=(source,), outputs=(memory,), resources=("encoder_attention",) if facts.attention is not None else ()
        )
        prime = Entry("prime", (memory,), resources=("cross",))
        forward = Entry(
            inputs=(_IDS,), outputs=(_TOKEN,), chunk="ids", resources=("kv", "positions", "cross", "sampler")
        )
        read = Seq(
            Call("encoder", inputs={source.name: source.name}, outputs={memory.name: "memory"}),
            Call("decoder", "prime", {memory.name: "memory"}),
        )
        first = Call("decoder", inputs={"ids": "start"}, outputs={"token": "token"}, emit={"token": "text"})
        write = Seq(first, Loop(replace(first, inputs={"ids": "token"}), TokenStop("token")))
        return Graph(
            nodes=(NodeSpec("encoder", (encoder,)), NodeSpec("decoder", (prime, forward))),
            walks={"encode": read, "decode": write},
            partitions=(Partition("main", ("encode", "decode")),),
            streams=(Stream("text", "main", CLIENT, _TOKEN, "tokens"),),
            inputs=(source, Port("start", "int64", ("T",))),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        facts = self.facts()
        decoder = facts.decoder
        cross = CrossKV(
            layers=decoder.layers,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            query_heads=decoder.heads,
            max_tokens=facts.max_memory,
        )
        found: dict[str, ResourceSpec] = {
            "kv": decoder.kv(),
            "positions": Positions(),
            "cross": cross,
            "sampler": decoder.sampler(prompt="start"),
        }
        if facts.attention is not None:
            found["encoder_attention"] = facts.attention
        return found

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["start"]) + answer_tokens(request))
