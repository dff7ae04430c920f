"""FLUX.2 [klein]'s API side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mstar.spec.tasks import ImageTask
from mstar_diffusion.flux2.references import as_reference
from mstar_diffusion.knobs import TEXT_TOKENS
from mstar_diffusion.noise import normal_by_point
from mstar_diffusion.processor import ImageProcessor
from mstar_diffusion.schedules import empirical_shift

__all__ = ["Flux2KleinProcessor"]


class Flux2KleinProcessor(ImageProcessor):
    """Source: diffusers 0.42.1, ``pipelines/flux2/pipeline_flux2_klein.py``. All prompts are padded to one length, and
    the denoiser sees the padding."""

    thinking: ClassVar[bool] = False

    def padded_length(self, length: int) -> int:
        return TEXT_TOKENS

    def noise(self, height: int, width: int, seed: int) -> NDArray[np.float32]:
        return normal_by_point((self.vae.latent * self.patch**2, height, width), seed)

    def mu(self, tokens: int, steps: int) -> float:
        return empirical_shift(tokens, steps)

    def references(self, task: ImageTask, names: Sequence[str]) -> list[NDArray[np.uint8]]:
        return [as_reference(image.pixels, name) for image, name in zip(task.images, names, strict=True)]
