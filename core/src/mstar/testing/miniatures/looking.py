"""Shape 1 with media: capital letters are pictures, which an encoder turns into what the language model sums up.

A picture's patches lie around its letter's id, so their mean, which is what attention with equal scores within the
picture gives, is the id. The language model knows it through the embeddings alone: the prompt's ids are negative there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.nn.model import Demand, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.spec.graph import Call, Entry, Graph, NodeSpec, Partition, Port
from mstar.spec.request import EngineRequest
from mstar.spec.resources import MediaEmbeddings, RaggedAttention, ResourceSpec
from mstar.testing.miniatures.catalog import PATCHES, VOCAB
from mstar.testing.miniatures.text import Chat, context_sums, text_demand, token_logits

__all__ = ["Look"]


class Eye(Node):
    def forward(self, step: Step, patches: Tensor) -> dict[str, Any]:
        """*patches* uint8 ``[P]``, :data:`PATCHES` to an embedding."""
        value = patches.to(step.dtype)[:, None, None]
        mean = step["within"].attend(torch.zeros_like(value), torch.zeros_like(value), value)
        step["media"].write(mean[::PATCHES, 0])
        return {}


class LookNode(Node):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        seen = step["media"].embed(ids, lambda known: known[:, None].to(step.dtype))
        ids = torch.round(seen[:, 0]).long()
        token = (context_sums(step, ids) + step["positions"].positions + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]))}


class Look(Chat):
    """Shape 1 with pictures, which are encoded in pieces and kept by content."""

    def graph(self) -> Graph:
        plain = super().graph()
        (forward,) = plain.nodes[0].entries
        forward = replace(forward, resources=(*forward.resources, "media"), frozen=("media",))
        patches = Port("patches", "uint8", ("P",), host=True)
        look = Entry(inputs=(patches,), chunk="patches", resources=("media", "within"), step_items=PATCHES)
        seen = (replace(patches, optional=True), Port("pieces", "int64", ("S", 4), optional=True, host=True))
        return replace(
            plain,
            nodes=(NodeSpec("eye", (look,), graph_items=100), replace(plain.nodes[0], entries=(forward,))),
            walks={"look": Call("eye", inputs={"patches": "patches"}), **plain.walks},
            partitions=(Partition("main", ("look", "generate")),),
            inputs=(*plain.inputs, *seen),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if request.inputs.get("pieces") is not None:
            yield Run("look")
        yield Run("generate", values={"patches": None})

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {
            **super().resources(),
            "media": MediaEmbeddings(width=1, items=PATCHES, tokens=512, max_tokens=256),
            "within": RaggedAttention(head_dim=1, segments="pieces"),
        }

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield from text_demand(request)
        pieces = request.inputs.get("pieces")
        yield Demand("media", tokens=0 if pieces is None else int(np.asarray(pieces)[:, 1].sum()))

    def build(self, node: str) -> Node:
        return Eye() if node == "eye" else LookNode()
