"""What M* knows of FLUX.2 [klein] without weights, torch or a device."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from mstar.spec.canvas import Canvas
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar_diffusion.knobs import SIZES, ImageKnobs, ImageOptions, Size

__all__ = ["FLUX2_KLEIN", "FLUX2_KLEIN_9B", "REFERENCES", "Flux2Knobs", "Flux2Options"]

REFERENCES = 4


class Flux2Knobs(ImageKnobs):
    """[klein] is distilled: it has no guidance."""

    num_inference_steps: int = 4


class Flux2Options(ImageOptions):
    capture_edit_sizes: tuple[Size, ...] | None = Field(
        None,
        max_length=16,
        description="Heights and widths whose edits of one reference of that size are captured at the start. Default: "
        "`capture_sizes`; `[]`: none.",
    )


FLUX2_KLEIN = ModelSpec(
    key="flux2_klein",
    family="flux2",
    summary="FLUX.2 [klein] 4B: pictures from words and up to four pictures in 4 steps.",
    weights=(
        WeightsRef(
            "hub",
            "black-forest-labs/FLUX.2-klein-4B",
            "e7b7dc27f91deacad38e78976d1f2b499d76a294",
            # the denoiser once more, in one file
            options={"ignore": ["flux-2-klein-4b.safetensors"]},
        ),
    ),
    licence=Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
    model="mstar_diffusion.flux2.model:Flux2Klein",
    processor="mstar_diffusion.flux2.processor:Flux2KleinProcessor",
    knobs=Flux2Knobs,
    options=Flux2Options,
    abilities=("image", "image_edit", "generate"),
    inputs=("text", "image"),
    outputs=("image", "progress", "preview"),
    canvas=Canvas(SIZES, references=REFERENCES),
    deployment="mstar_diffusion:deployments/flux2_klein.yaml",
    size=15_800_000_000,
    tiny="mstar_diffusion.flux2.tiny:write",
    examples="mstar_diffusion.examples:example",
)

FLUX2_KLEIN_9B = replace(
    FLUX2_KLEIN,
    key="flux2_klein_9b",
    summary="FLUX.2 [klein] 9B: as the 4B, larger; weights for non-commercial use.",
    weights=(
        WeightsRef(
            "hub",
            "black-forest-labs/FLUX.2-klein-9B",
            "92196c8e11f7b6cf2b7493e037d8c5345c559216",
            options={"ignore": ["flux-2-klein-9b.safetensors"]},
        ),
    ),
    licence=Licence(
        "FLUX Non-Commercial License",
        "https://huggingface.co/black-forest-labs/FLUX.2-klein-9B/blob/main/LICENSE.md",
        commercial=False,
        gated=True,
        permissive=False,
    ),
    deployment="mstar_diffusion:deployments/flux2_klein_9b.yaml",
    size=34_370_000_000,
)
