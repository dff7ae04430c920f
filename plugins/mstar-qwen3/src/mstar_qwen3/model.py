"""Qwen3.5's worker side: the language model, and the vision tower before it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mstar.nn.model import BuildContext, Demand, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.spec.graph import Call, Entry, Graph, NodeSpec, Partition, Port
from mstar.spec.request import EngineRequest
from mstar.spec.resources import MediaEmbeddings, RaggedAttention, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_qwen3.decoder import Qwen35Node
from mstar_qwen3.preprocessing import read_patchers
from mstar_qwen3.text import Qwen35Text
from mstar_qwen3.vision import VisionEncoder, kernel_head_dim
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["Qwen35", "SeeingNode"]

_CAPTURED_PATCHES = 16384
_PATCHES_A_TOKEN = 16
"""A patch costs the encoder about so much less than a token costs the language model."""
_LARGEST_VIDEO = 32768
"""Embeddings of one request's media: a published checkpoint's longest video has 12288."""


class SeeingNode(Qwen35Node):
    """The language model, which finds media in the places of negative ids."""

    tensor_parallel = True

    def embed(self, step: Step, ids: Tensor) -> Tensor:
        return step["media"].embed(ids, self.model.embed_tokens)  # type: ignore[no-any-return]


class Qwen35(Qwen35Text):
    """The published models. A request with pictures or videos brings ``patches``, ``places``, ``pieces`` and
    ``positions`` (:mod:`mstar_qwen3.processor`); without any it is the language model's."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        found = self.sizes.vision
        self.vision = None
        if found is not None and not context.options.text_only:
            self.vision = VisionConfig.from_hf(found, self.sizes.text.hidden)

    def graph(self) -> Graph:
        plain = super().graph()
        if self.vision is None:
            return plain
        (llm,) = plain.nodes
        (forward,) = llm.entries
        forward = replace(forward, resources=(*forward.resources, "media"), frozen=(*forward.frozen, "media"))
        patches = Port("patches", "uint8", ("P", self.vision.values), host=True)
        places = Port("places", "int32", ("P", 4), host=True)
        look = Entry(
            inputs=(patches, places),
            chunk="patches",
            resources=("media", "encoder_attention"),
            step_items=_PATCHES_A_TOKEN,
        )
        seen = (
            patches,
            places,
            Port("pieces", "int64", ("S", 4), host=True),
            Port("positions", "int64", (3, "T"), host=True),
        )
        return replace(
            plain,
            nodes=(NodeSpec("encoder", (look,), graph_items=_CAPTURED_PATCHES), replace(llm, entries=(forward,))),
            walks={"look": Call("encoder", inputs={"patches": "patches", "places": "places"}), **plain.walks},
            partitions=(Partition("main", ("look", *plain.partitions[0].walks)),),
            inputs=(*plain.inputs, *(replace(port, optional=True) for port in seen)),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if request.inputs.get("pieces") is not None:
            yield Run("look")
        yield Run("generate", values={} if self.vision is None else {"patches": None, "places": None})

    def resources(self) -> Mapping[str, ResourceSpec]:
        plain, vision = super().resources(), self.vision
        if vision is None:
            return plain
        size = kernel_head_dim(vision.head_dim, self.context.device)
        attention = RaggedAttention(heads=vision.heads, kv_heads=vision.heads, head_dim=size, segments="pieces")
        most = min(self.max_tokens, _LARGEST_VIDEO)
        media = MediaEmbeddings(width=vision.width, items=vision.block, tokens=2 * most, max_tokens=most)
        return {**plain, "media": media, "encoder_attention": attention}

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield from super().demand(request)
        if self.vision is not None:
            pieces = request.inputs.get("pieces")
            yield Demand("media", tokens=0 if pieces is None else int(np.asarray(pieces)[:, 1].sum()))

    def build(self, node: str) -> Node:
        if node == "llm":
            kind = Qwen35Node if self.vision is None else SeeingNode
            return kind(self.sizes.text, self.context.dtype)
        assert self.vision is not None
        assert isinstance(self.context.weights, Path)
        patcher, _ = read_patchers(self.context.weights, self.vision)
        pixels = min(self.context.options.image_pixels or patcher.most, patcher.most)
        return VisionEncoder(self.vision, patcher.values(), pixels // self.vision.patch**2)

    def weights(self, node: str) -> WeightMap:
        if node == "llm":
            return super().weights(node)
        with torch.device("meta"):
            module = self.build(node)
        return WeightMap.from_module(
            module, rename={"": "model.visual."}, ignore=(r"model\.language_model\..*", r"lm_head\..*", r"mtp\..*")
        )
