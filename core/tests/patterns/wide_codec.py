"""Speaking models on the LM-to-codec pattern whose codec looks to both sides and draws noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.hookspecs import hookimpl
from mstar.nn.node import Node, Step
from mstar.patterns.lm_codec import LMCodec, LMCodecFacts
from mstar.spec.graph import Fixed, Ramp
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.tasks import Task
from mstar.testing.miniatures.catalog import VOCAB
from mstar.testing.miniatures.common import MiniKnobs, MiniProcessor
from mstar.testing.miniatures.text import SHAPE, SumNode

FRAME, SAMPLES, REACH = 3, 4, 2  # tokens and samples of a frame; frames to either side that it depends on

_EXACT = LMCodecFacts(
    SHAPE, 100, SAMPLES, Fixed(1, REACH, REACH, FRAME), codes=((0, VOCAB),) * FRAME, noise=True, codec_rows=(1, 2)
)
VARIANTS = {
    "exact": _EXACT,
    "ramp": replace(_EXACT, chunk=Ramp((1, 2, 5), REACH, REACH, FRAME)),
    "overlap": replace(_EXACT, chunk=Fixed(2, REACH, REACH + 1, FRAME), overlap=2),
    "short": replace(_EXACT, chunk=Fixed(1, 0, 0, FRAME)),
    "picky": replace(_EXACT, codes=((0, VOCAB), (0, VOCAB * 3 // 4), (VOCAB // 4, VOCAB))),
}


def sound(codes: Tensor, key: Tensor, offset: Tensor) -> Tensor:
    """``[rows, C]`` to ``[rows, C / FRAME * SAMPLES]``: each frame is the sum of those around it and of their noise,
    which key and place make."""
    frames = codes.unflatten(1, (-1, FRAME)).sum(2)
    frames = frames + (key[:, None] * (offset[:, None] // FRAME + torch.arange(frames.shape[1]))) % 13
    padded = torch.nn.functional.pad(frames.double(), (REACH, REACH))
    return padded.unfold(1, 2 * REACH + 1, 1).sum(2).repeat_interleave(SAMPLES, 1).float()


class WideCodec(Node):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, ...]] = []

    def forward(self, step: Step, codes: Tensor, key: Tensor, offset: Tensor) -> dict[str, Any]:
        self.steps.append(tuple(codes.shape))
        return {"samples": sound(codes, key, offset)}


class Wide(LMCodec):
    variant = ""

    def facts(self) -> LMCodecFacts:
        return VARIANTS[self.variant]

    def build(self, node: str) -> Node:
        return SumNode() if node == "lm" else WideCodec()


globals().update({key: type(key, (Wide,), {"variant": key}) for key in VARIANTS})  # a model is named "module:Class"


class WideProcessor(MiniProcessor):
    def inputs(self, task: Task) -> dict[str, Any]:
        return {**super().inputs(task), "noise_key": np.array(task.knobs.seed or 0)}


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            key=key,
            family="tests",
            summary="Speaks.",
            weights=(),
            licence=Licence("Apache-2.0"),
            model=f"wide_codec:{key}",
            processor="wide_codec:WideProcessor",
            knobs=MiniKnobs,
            abilities=("generate",),
            outputs=("audio",),
            deployment={"device": "cpu", "dtype": "float32"},
        )
        for key in VARIANTS
    ]
