"""What M* knows of Z-Image without weights, torch or a device."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mstar.spec.canvas import Canvas
from mstar.spec.knobs import Finite
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar_diffusion.knobs import SIZES, ImageKnobs, ImageOptions

__all__ = ["Z_IMAGE_TURBO", "ZImageKnobs", "ZImageOptions"]


class ZImageKnobs(ImageKnobs):
    guidance_scale: Finite = Field(
        0.0, ge=0, le=20, description="How much further from `negative_prompt`; 0, as the turbo was trained, is off."
    )
    negative_prompt: str = Field(
        "",
        max_length=100_000,
        description="What the picture shall not show, with guidance: up to 512 tokens.",
        strict=True,
    )


class ZImageOptions(ImageOptions):
    capture_text_tokens: tuple[Annotated[int, Field(ge=32, le=512, multiple_of=32, strict=True)], ...] = Field(
        (32, 64, 96),
        max_length=16,
        description="Lengths of prompts, in tokens, whose denoise steps are captured at the start.",
    )


Z_IMAGE_TURBO = ModelSpec(
    key="z_image_turbo",
    family="z_image",
    summary="Z-Image-Turbo: pictures from words in 8 steps (6B).",
    weights=(WeightsRef("hub", "Tongyi-MAI/Z-Image-Turbo", "f332072aa78be7aecdf3ee76d5c247082da564a6"),),
    licence=Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    model="mstar_diffusion.z_image.model:ZImage",
    processor="mstar_diffusion.z_image.processor:ZImageProcessor",
    knobs=ZImageKnobs,
    options=ZImageOptions,
    abilities=("image", "generate"),
    outputs=("image", "progress", "preview"),
    canvas=Canvas(SIZES),
    deployment="mstar_diffusion:deployments/z_image_turbo.yaml",
    size=32_900_000_000,
    tiny="mstar_diffusion.z_image.tiny:write",
    examples="mstar_diffusion.examples:example",
)
