"""A model that sees, on the encoder-LM pattern: a tiny Llama whose prompt holds embeddings of "pictures"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.hookspecs import hookimpl
from mstar.nn.node import Node, Packed, Step
from mstar.patterns.encoder_lm import EncoderLM, EncoderLMFacts
from mstar.processing.chat import TextProcessor
from mstar.spec.graph import Port
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import Prepared
from mstar.spec.tasks import GenerateTask, Image, Task
from mstar.weights.names import WeightMap

HIDDEN, PATCH, PLACEHOLDER = 48, 3, 7


class Eye(Node):
    """A row of pixels becomes an embedding: the pixel's colour, spread over the width."""

    def forward(self, step: Step, patches: Tensor) -> dict[str, Any]:
        return {"media": Packed(look(patches), list(step.lengths))}


def look(patches: Tensor) -> Tensor:
    return torch.sin(patches.repeat(1, HIDDEN // PATCH) * torch.arange(1, HIDDEN + 1) / 8)


class Seeing(EncoderLM):
    def facts(self) -> EncoderLMFacts:
        return EncoderLMFacts(Port("patches", "float32", ("P", PATCH)), PLACEHOLDER)

    def build_encoder(self) -> Node:
        return Eye()

    def weights(self, node: str) -> WeightMap | None:
        return None if node == "encoder" else super().weights(node)


class SeeingProcessor(TextProcessor):
    def prepare(self, task: Task, request_id: str) -> Prepared:
        assert isinstance(task, GenerateTask)
        images = [part.pixels for part in task.parts if isinstance(part, Image)]
        prepared = super().prepare(GenerateTask(knobs=task.knobs, text=task.text), request_id)
        if images:
            patches = np.concatenate([pixels.reshape(-1, PATCH) for pixels in images]).astype(np.float32)
            ids = prepared.request.inputs["prompt"]
            prepared.request.inputs["prompt"] = np.concatenate([np.full(len(patches), PLACEHOLDER), ids])
            prepared.request.inputs["patches"] = patches
        return prepared


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            key="seeing",
            family="seeing",
            summary="a model that sees, for tests",
            weights=(),
            licence=Licence("Apache-2.0"),
            model="seeing:Seeing",
            processor="seeing:SeeingProcessor",
            knobs=SamplingKnobs,
            inputs=("text", "image"),
            deployment={"dtype": "float32", "device": "cpu", "engine": {"threads": 1}},
        )
    ]
