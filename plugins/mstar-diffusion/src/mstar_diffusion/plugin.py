"""The models of pictures, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from mstar import hookimpl
from mstar.spec.model import ModelSpec
from mstar_diffusion.flux2.spec import FLUX2_KLEIN, FLUX2_KLEIN_9B
from mstar_diffusion.z_image.spec import Z_IMAGE_TURBO

__all__ = ["mstar_models"]


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return (Z_IMAGE_TURBO, FLUX2_KLEIN, FLUX2_KLEIN_9B)
