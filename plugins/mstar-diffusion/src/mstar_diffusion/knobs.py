"""What requests and operators set of every model of pictures here. No torch and no numpy: `mstar models` reads it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mstar.spec.canvas import Sizes
from mstar.spec.knobs import Finite, Knobs

__all__ = ["AREA", "MOST_STEPS", "SIZES", "TEXT_TOKENS", "ImageKnobs", "ImageOptions", "Lora", "Size"]

AREA = 2048 * 2048

TEXT_TOKENS = 512
"""The longest prompt, its template included."""

MOST_STEPS = 100
"""The most denoise steps of a request: schedules are padded to so many."""

SIZES = Sizes(multiple=16, min_side=64, max_side=8192)
"""Sides in pixels: a token is a square of 16. How many there may be in all is the operator's choice."""

Side = Annotated[int, Field(ge=SIZES.min_side, le=SIZES.max_side, multiple_of=SIZES.multiple, strict=True)]
Size = tuple[Side, Side]
"""Height and width in pixels."""


class ImageKnobs(Knobs):
    """Parameters of a request for a picture. Whoever draws *steps* and defaults in is the family."""

    num_inference_steps: int = Field(
        8, ge=1, le=MOST_STEPS, description="Denoise steps: more are slower, and finer up to a point.", strict=True
    )
    width: int | None = Field(
        None,
        ge=SIZES.min_side,
        le=SIZES.max_side,
        multiple_of=SIZES.multiple,
        description="Width in pixels, where the request has no `size`. Default: 1024, or the first reference's.",
        strict=True,
    )
    height: int | None = Field(
        None,
        ge=SIZES.min_side,
        le=SIZES.max_side,
        multiple_of=SIZES.multiple,
        description="Height in pixels, where the request has no `size`. Default: 1024, or the first reference's.",
        strict=True,
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="The same seed gives the same picture, alone and in any batch. Default: another each time.",
        strict=True,
    )


class Lora(Knobs):
    """One adapter that is folded into the denoiser's weights when they are loaded."""

    path: str = Field(description="A safetensors file, or a folder that holds one.", min_length=1)
    scale: Finite = Field(1.0, ge=-100, le=100, description="Multiplies what the adapter adds.")


class ImageOptions(Knobs):
    """Options of the deployment (`model_kwargs`)."""

    may_change_nothing: ClassVar[tuple[str, ...]] = ()

    max_image_area: int = Field(
        AREA, ge=64 * 64, le=8192 * 8192, description="Most pixels of a picture; more is answered 400.", strict=True
    )
    max_batch_size: int = Field(
        8, ge=1, le=64, description="Most requests in one denoise step; more take turns.", strict=True
    )
    attention_backend: Literal["sdpa", "flashinfer", "cudnn", "flash", "efficient", "math"] = Field(
        "sdpa",
        description="The denoiser's attention on a GPU: FlashInfer's, one of PyTorch's by name, or `sdpa`, the first "
        "of PyTorch's that fits.",
    )
    compile_exact_ops: bool | Annotated[tuple[Literal["norms", "activations"], ...], Field(max_length=2)] = Field(
        False,
        description="With `engine.compile`: the compiler leaves these operations of the denoiser alone; true: both "
        "kinds.",
    )
    vae_compile: bool = Field(
        True, description="With `engine.compile`: compile the decoder of pictures too.", strict=True
    )
    vae_tiling: Literal["auto", "always", "never"] = Field(
        "auto", description="Decode pictures in tiles; `auto`: where free memory is short of a whole one."
    )
    vae_tile: int = Field(512, ge=64, le=4096, description="A tile's side in pixels.", strict=True)
    capture_sizes: tuple[Size, ...] = Field(
        ((1024, 1024),),
        max_length=16,
        description="Heights and widths whose denoise steps are captured as CUDA graphs at the start; others when they "
        "have come often enough.",
    )
    capture_batch_sizes: tuple[Annotated[int, Field(ge=1, le=64, strict=True)], ...] = Field(
        (1, 2, 4, 8),
        min_length=1,
        max_length=16,
        description="Numbers of requests whose denoise steps are captured; steps of others run as plain calls.",
    )
    lora: tuple[Lora, ...] = Field(
        (), max_length=16, description="Adapters to fold into the denoiser: `[{path: FILE, scale: 1.0}]`."
    )
