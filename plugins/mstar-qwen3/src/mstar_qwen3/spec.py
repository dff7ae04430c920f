"""What M* knows of Qwen3.5 and Qwen3.8 without weights, torch or a device."""

from __future__ import annotations

from pydantic import Field

from mstar.spec.knobs import SamplingKnobs, TextOptions
from mstar.spec.model import Frames, Licence, ModelSpec, WeightsRef

__all__ = ["MODELS", "Qwen35Knobs", "Qwen35Options"]


class Qwen35Knobs(SamplingKnobs):
    """The sampling knobs with the values that the authors recommend for thinking, and whether the model thinks."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    enable_thinking: bool | None = Field(
        None, description="Think before the answer. Default: what the checkpoint's chat template does.", strict=True
    )


class Qwen35Options(TextOptions):
    """What the operator sets for all requests."""

    text_only: bool = Field(
        False,
        description="Leave the vision tower out: its weights are not loaded, and pictures are refused.",
        strict=True,
    )
    image_pixels: int | None = Field(
        None,
        ge=1,
        description="Most pixels that a picture is resized to; 1024 cost a token. Default: the checkpoint's.",
        strict=True,
    )
    video_pixels: int | None = Field(
        None,
        ge=1,
        description="Most pixels that all frames of a video together are resized to; 2048 cost a token. Default: the "
        "checkpoint's.",
        strict=True,
    )


_LICENCE = Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_SEES = ("text", "image", "video")


def _spec(
    key: str,
    name: str,
    revision: str,
    size: int,
    summary: str,
    inputs: tuple[str, ...] = _SEES,
    layouts: tuple[str, ...] = (),
) -> ModelSpec:
    return ModelSpec(
        key=key,
        family="qwen3_5",
        summary=summary,
        weights=(WeightsRef("hub", f"Qwen/{name}", revision),),
        licence=_LICENCE,
        model="mstar_qwen3.model:Qwen35",
        processor="mstar_qwen3.processor:Qwen35Processor",
        knobs=Qwen35Knobs,
        options=Qwen35Options,
        abilities=("chat", "completion", "generate"),
        outputs=("text", "reasoning"),
        deployment=f"mstar_qwen3:deployments/{key}.yaml",
        layouts={layout: f"mstar_qwen3:deployments/{key}_{layout}.yaml" for layout in layouts},
        size=size,
        tiny="mstar_qwen3.tiny:write",
        examples="mstar_qwen3.examples:example",
        inputs=inputs,
        frames=Frames(fps=2.0, least=4, most=768),
    )


MODELS: tuple[ModelSpec, ...] = (
    _spec(
        "qwen3_5_0.8b",
        "Qwen3.5-0.8B",
        "2fc06364715b967f1860aea9cf38778875588b17",
        1_746_877_568,
        "Qwen3.5 0.8B: chat with pictures and video, thinking, tools; a hybrid of gated DeltaNet and attention.",
    ),
    _spec(
        "qwen3_5_2b",
        "Qwen3.5-2B",
        "15852e8c16360a2fea060d615a32b45270f8a8fc",
        4_548_139_648,
        "Qwen3.5 2B: chat with pictures and video, thinking, tools; a hybrid of gated DeltaNet and attention.",
    ),
    _spec(
        "qwen3_5_4b",
        "Qwen3.5-4B",
        "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a",
        9_319_730_176,
        "Qwen3.5 4B: chat with pictures and video, thinking, tools; a hybrid of gated DeltaNet and attention.",
    ),
    _spec(
        "qwen3_5_9b",
        "Qwen3.5-9B",
        "c202236235762e1c871ad0ccb60c8ee5ba337b9a",
        19_306_208_736,
        "Qwen3.5 9B: chat with pictures and video, thinking, tools; a hybrid of gated DeltaNet and attention.",
    ),
    _spec(
        "qwen3_5_27b",
        "Qwen3.5-27B",
        "fc05daec18b0a78c049392ed2e771dde82bdf654",
        55_562_855_904,
        "Qwen3.5 27B: chat with pictures and video, thinking, tools; a hybrid of gated DeltaNet and attention.",
    ),
    _spec(
        "qwen3_8_27b",
        "Qwen3.8-27B",
        "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0",
        55_562_855_904,
        "Qwen3.8 27B: Qwen3.5's architecture with newer weights.",
        ("text", "image"),
        ("tp4",),
    ),
)
