"""Encoder → LM: sounds or pictures take the place of placeholder tokens in a causal language model's prompt.

::

    media → encoder → embeddings ┐
    prompt ──────────────────────┴ llm.embed → embeds
    prompt + embeds → llm → token ⟲ llm → "text"

A request without media skips the first two calls and is a plain language model's.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mstar.nn.config import DecoderConfig
from mstar.nn.model import Outcome, Run
from mstar.nn.node import Node, Packed, Sampled, Step
from mstar.patterns.causal_lm import CausalLM, CausalLMNode
from mstar.spec.errors import RequestError
from mstar.spec.graph import Call, Entry, Graph, NodeSpec, Partition, Port, Seq
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RaggedAttention, ResourceSpec

__all__ = ["EncoderLM", "EncoderLMFacts", "EncoderLMNode"]


@dataclass(frozen=True)
class EncoderLMFacts:
    """What a family of this pattern states.

    :param media: the request's optional input, packed (features ``("F", 128)``, patches ``("P", 1176)``); the encoder's
        port has its name. :param placeholder: the prompt's id that stands for one embedding.
    :param attention: the encoder's attention, if it attends within its input: resource ``encoder_attention``.
    """

    media: Port
    placeholder: int
    attention: RaggedAttention | None = None


class EncoderLMNode(CausalLMNode):
    """A causal LM's node whose prompt may come with embeddings."""

    tensor_parallel = True

    def __init__(self, config: DecoderConfig, placeholder: int):
        super().__init__(config)
        self.placeholder = placeholder

    def embed(self, step: Step, ids: Tensor, media: Packed) -> dict[str, Tensor]:
        """*media* ``[M, hidden]`` in place of the placeholders among *ids* ``[N]``, in order. Returns ``embeds``
        ``[N, hidden]``.

        :raises RequestError: a request's placeholders are not as many as its embeddings.
        """
        places = ids == self.placeholder
        wanted = [int(part.sum()) for part in torch.split(places, list(step.lengths))]
        for count, length in zip(wanted, media.lengths, strict=True):
            if count != length:
                raise RequestError(f"the prompt has {count} placeholders for {length} embeddings of media")
        embeds = self.model.embed_tokens(ids)
        embeds[places] = media.data.to(embeds.dtype)
        return {"embeds": embeds}

    def forward(  # type: ignore[override]  # the engine calls it by port names
        self, step: Step, ids: Tensor, embeds: Tensor | None
    ) -> Mapping[str, Sampled]:
        """Entry ``forward``: as :class:`CausalLMNode`'s, from *embeds* ``[N, hidden]`` where there are some."""
        x = self.model.embed_tokens(ids) if embeds is None else embeds.clone()  # the stack adds to it in place
        return self.sample(step, self.model(x, step["positions"].positions, step["kv"]))


class EncoderLM(CausalLM):
    """Graph and resources of a language model that sees or hears. A family adds :meth:`facts` and the encoder in
    :meth:`build_encoder`; the language model's side is :class:`CausalLM`'s.

    *Nodes.* ``encoder.forward(step, MEDIA) -> {"media": Packed}``: embeddings of the LM's width. ``llm`` is an
    :class:`EncoderLMNode`.

    *A request* brings ``prompt`` and perhaps MEDIA: all of its media, one after the other. There is no prefix reuse:
    equal placeholders stand for different media.
    """

    @abc.abstractmethod
    def facts(self) -> EncoderLMFacts: ...

    @abc.abstractmethod
    def build_encoder(self) -> Node: ...

    def build(self, node: str) -> Node:
        return self.build_encoder() if node == "encoder" else EncoderLMNode(self.config, self.facts().placeholder)

    def graph(self) -> Graph:
        facts, plain = self.facts(), super().graph()
        hidden = self.config.hidden
        source = replace(facts.media, optional=False)
        media, embeds = Port("media", "model", ("M", hidden)), Port("embeds", "model", ("T", hidden))
        ids = Port("ids", "int64", ("T",))
        encoder = Entry(
            inputs=(source,), outputs=(media,), resources=("encoder_attention",) if facts.attention is not None else ()
        )
        forward = plain.node("llm").entry("forward")
        forward = replace(forward, inputs=(ids, replace(embeds, optional=True)), prefix=False)
        look = Seq(
            Call("encoder", inputs={source.name: source.name}, outputs={"media": "media"}),
            Call("llm", "embed", {"ids": "prompt", "media": "media"}, {"embeds": "embeds"}),
        )
        generate = plain.walks["generate"]
        assert isinstance(generate, Seq)
        prefill, decode = generate.parts
        assert isinstance(prefill, Call)
        prefill = replace(prefill, inputs={**prefill.inputs, "embeds": "embeds"})
        return replace(
            plain,
            nodes=(
                NodeSpec("encoder", (encoder,)),
                NodeSpec("llm", (Entry("embed", (ids, media), (embeds,)), forward)),
            ),
            walks={"look": look, "generate": Seq(prefill, decode)},
            partitions=(Partition("main", ("look", "generate")),),
            inputs=(*plain.inputs, replace(source, optional=True)),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if request.inputs.get(self.facts().media.name) is not None:
            yield Run("look")
        yield Run("generate")

    def resources(self) -> Mapping[str, ResourceSpec]:
        attention = self.facts().attention
        return {**super().resources(), **({"encoder_attention": attention} if attention is not None else {})}
