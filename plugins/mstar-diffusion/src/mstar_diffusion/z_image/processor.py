"""Z-Image's API side."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mstar.spec.tasks import ImageTask
from mstar_diffusion.noise import normal_by_point
from mstar_diffusion.processor import ImageProcessor

__all__ = ["ZImageProcessor"]

_MULTIPLE = 32
"""Captions are padded to a multiple of so many tokens (:data:`mstar_diffusion.z_image.dit.MULTIPLE`)."""


class ZImageProcessor(ImageProcessor):
    """Source: diffusers 0.42.1, ``pipelines/z_image/pipeline_z_image.py``."""

    thinking: ClassVar[bool] = True

    def padded_length(self, length: int) -> int:
        return -(-length // _MULTIPLE) * _MULTIPLE

    def noise(self, height: int, width: int, seed: int) -> NDArray[np.float32]:
        patch, channels = self.patch, self.vae.latent
        drawn = normal_by_point((channels, height * patch, width * patch), seed)
        squares = drawn.reshape(height, patch, width, patch, channels).swapaxes(1, 2)
        return np.ascontiguousarray(squares.reshape(height, width, -1))

    def negative(self, task: ImageTask) -> str | None:
        knobs = task.knobs
        return str(knobs.negative_prompt) if knobs.guidance_scale > 0 else None
