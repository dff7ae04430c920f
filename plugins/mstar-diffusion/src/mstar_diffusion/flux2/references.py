"""Pictures that a request refers to, as FLUX.2's autoencoder takes them.

Source: diffusers 0.42.1, ``Flux2ImageProcessor`` and its use in ``pipelines/flux2/pipeline_flux2_klein.py``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from mstar.spec.errors import RequestError

__all__ = ["as_reference"]

_AREA = 1024 * 1024
_LEAST_SIDE = 64
_MOST_RATIO = 8
_MULTIPLE = 16


def as_reference(pixels: NDArray[np.uint8], param: str) -> NDArray[np.uint8]:
    """*pixels* ``[H, W, 3]``, of at most 1024 x 1024 pixels, cut to multiples of 16 around its middle.

    :raises RequestError: it is too small, or too long for its width; names *param*.
    """
    height, width = pixels.shape[:2]
    if min(width, height) < _LEAST_SIDE:
        raise RequestError(
            f"{param!r}: a picture of {width}x{height} is too small; the least side is {_LEAST_SIDE}", param=param
        )
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise RequestError(
            f"{param!r}: a picture of {width}x{height} is too long; one side may be {_MOST_RATIO} times the other",
            param=param,
        )
    if width * height > _AREA:
        scale = math.sqrt(_AREA / (width * height))
        size = (int(width * scale), int(height * scale))
        pixels = np.asarray(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.LANCZOS))
        height, width = pixels.shape[:2]
    rows, columns = height // _MULTIPLE * _MULTIPLE, width // _MULTIPLE * _MULTIPLE
    top, left = (height - rows) // 2, (width - columns) // 2
    return np.ascontiguousarray(pixels[top : top + rows, left : left + columns])
