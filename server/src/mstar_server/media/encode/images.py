"""Pixels → PNG, WebP and JPEG files; bytes → base64."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64
from PIL import Image as Pillow

from mstar_server.media.encode.png import png_parts

__all__ = ["IMAGE_TYPES", "base64_text", "encode_image", "image_text", "png"]

IMAGE_TYPES: Mapping[str, str] = {"png": "image/png", "webp": "image/webp", "jpeg": "image/jpeg"}
"""Format → its media type."""


def encode_image(pixels: Any, name: str, quality: int = 90) -> bytes:
    """uint8 ``[H, W, 3]`` (or ``[H, W, 4]`` with transparency, which JPEG lays on white) → a file.

    :param name: a key of :data:`IMAGE_TYPES`. :param quality: 0…100, of WebP and JPEG; 100 makes WebP lossless.
    """
    return png(pixels) if name == "png" else _by_pillow(pixels, name, quality)


def image_text(pixels: Any, name: str, quality: int = 90) -> list[bytes]:
    """:func:`encode_image` as base64, in the parts that it is made in."""
    if name == "png":
        return png_parts(pixels, pybase64.b64encode)
    return [pybase64.b64encode(_by_pillow(pixels, name, quality))]


def _by_pillow(pixels: Any, name: str, quality: int) -> bytes:
    image, out = Pillow.fromarray(np.ascontiguousarray(pixels)), io.BytesIO()
    if name == "webp":
        image.save(out, "WEBP", quality=quality, lossless=quality == 100)
        return out.getvalue()
    if name != "jpeg":
        raise ValueError(f"no image format {name!r}; known: {', '.join(IMAGE_TYPES)}")
    if image.mode == "RGBA":
        image = Pillow.alpha_composite(Pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)
    image.convert("RGB").save(out, "JPEG", quality=max(1, quality))
    return out.getvalue()


def png(pixels: Any) -> bytes:
    """uint8 ``[H, W, 3]`` → a PNG file."""
    return b"".join(png_parts(pixels))


def base64_text(data: bytes) -> str:
    return pybase64.b64encode_as_string(data)
