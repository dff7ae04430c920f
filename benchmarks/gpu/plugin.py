"""A plugin that serves the shapes as models, on the causal-LM pattern. Their weights come with ``--weights``."""

from __future__ import annotations

from collections.abc import Sequence

from gpu.shapes import SHAPES
from mstar.hookspecs import hookimpl
from mstar.spec.knobs import SamplingKnobs, TextOptions
from mstar.spec.model import Licence, ModelSpec


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            key=name,
            family="benchmark",
            summary=f"random weights at the shape of {name}",
            weights=(),
            licence=Licence("Apache-2.0"),
            model="mstar.patterns.causal_lm:CausalLM",
            processor="mstar.processing.chat:TextProcessor",
            knobs=SamplingKnobs,
            options=TextOptions,
            abilities=("chat", "completion", "generate"),
        )
        for name in SHAPES
    ]
