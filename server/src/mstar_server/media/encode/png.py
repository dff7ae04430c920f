"""Pixels → a PNG file, by PyAV: FFmpeg's encoder with one filter for all rows takes less than half of the time of
Pillow's, which tries all five on each, and makes files of the same size."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

__all__ = ["encode_png"]

_FORMATS = {1: "gray", 3: "rgb24", 4: "rgba"}
_HOW = {"pred": "avg", "compression_level": "1"}
"""The average filter, which is among the best for pictures of the world and of models; zlib's lowest level, several
times faster than its default for a few per cent more bytes."""


def encode_png(pixels: Any) -> bytes:
    """*pixels*: uint8 ``[H, W, 3]``, ``[H, W, 4]`` with transparency, or grey ``[H, W]``.

    :raises ValueError: they are something else, or there are none.
    """
    picture = np.ascontiguousarray(pixels)
    channels = 1 if picture.ndim == 2 else picture.shape[-1] if picture.ndim == 3 else 0
    if picture.dtype != np.uint8 or channels not in _FORMATS or not picture.size:
        raise ValueError(f"a PNG file is made of uint8 [H, W], [H, W, 3] or [H, W, 4], not {_described(picture)}")
    if channels == 1:
        picture = picture.reshape(picture.shape[:2])
    encoder: Any = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = picture.shape[:2]
    encoder.pix_fmt, encoder.time_base, encoder.options = _FORMATS[channels], Fraction(1), _HOW
    frame = av.VideoFrame.from_ndarray(picture, format=_FORMATS[channels])
    return b"".join(bytes(packet) for part in (frame, None) for packet in encoder.encode(part))


def _described(picture: NDArray[Any]) -> str:
    return f"{picture.dtype} {list(picture.shape)}"
