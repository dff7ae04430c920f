"""Images → RGB pixels, in a decoder's process."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError

from mstar_server.media.kinds import HEAD_BYTES, IMAGE_FORMATS, require
from mstar_server.media.limits import MediaFault, MediaLimits, damaged
from mstar_server.media.output import ArrayRef, Decoded, Output

__all__ = ["decode_frames", "decode_image", "decode_mask"]

Pillow.MAX_IMAGE_PIXELS = None  # the limit is ours, and judged in _open

_FORMATS = tuple(name.upper() for name in IMAGE_FORMATS)


def decode_image(file: BinaryIO, limits: MediaLimits, output: Output) -> Decoded:
    """The first frame, upright, uint8 ``[H, W, 3]``; what is transparent lies on white.

    Raises :class:`MediaFault`; the number of pixels is judged from the header, before anything is decoded.
    """
    require(file.read(HEAD_BYTES), "image")
    file.seek(0)
    pixels = _pixels(file, limits)
    output.write(pixels)
    return Decoded(frames=ArrayRef("uint8", pixels.shape, 0))


def decode_mask(file: BinaryIO, limits: MediaLimits, output: Output) -> Decoded:
    """The opacity of the first frame, upright, uint8 ``[H, W]``. Raises :class:`MediaFault`, also when the image has
    none."""
    require(file.read(HEAD_BYTES), "image")
    file.seek(0)
    image = _open(file, limits)
    if "A" not in image.getbands() and "a" not in image.getbands() and "transparency" not in image.info:
        message = "the mask has no transparency: transparent pixels (of a PNG or WebP) say where the image is edited"
        raise MediaFault(message, "invalid_image")
    try:
        opacity = np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[:, :, 3]
    except MemoryError:
        raise
    except Exception as error:  # as in _pixels
        raise damaged("image", error) from None
    output.write(opacity)
    return Decoded(frames=ArrayRef("uint8", opacity.shape, 0))


def decode_frames(file: BinaryIO, sizes: tuple[int, ...], fps: float, limits: MediaLimits, output: Output) -> Decoded:
    """A video that was sent as image files of *sizes* bytes, one behind the other, *fps* a second."""
    if len(sizes) > limits.max_video_frames:
        raise MediaFault(f"{len(sizes)} frames are more than the limit of {limits.max_video_frames}", "too_many_frames")
    first: tuple[int, ...] | None = None
    for number, size in enumerate(sizes):
        try:
            pixels = _pixels(io.BytesIO(file.read(size)), limits)
        except MediaFault as fault:
            raise MediaFault(f"frame {number}: {fault.message}", fault.code, fault.status) from None
        first = first or pixels.shape
        if pixels.shape != first:
            message = f"frame {number} has {_size(pixels.shape)} pixels, frame 0 has {_size(first)}; send one size"
            raise MediaFault(message, "invalid_video")
        if len(sizes) * first[0] * first[1] > limits.max_video_pixels:
            most = limits.max_video_pixels
            message = f"{len(sizes)} frames of {_size(first)} are more than the limit of {most} pixels"
            raise MediaFault(message, "video_too_large")
        output.write(pixels)
    if first is None:
        raise MediaFault("the video has no frames", "invalid_video")
    return Decoded(frames=ArrayRef("uint8", (len(sizes), *first), 0), fps=fps)


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"


def _pixels(file: BinaryIO, limits: MediaLimits) -> np.ndarray[Any, Any]:
    image = _open(file, limits)
    try:
        return np.asarray(_rgb(ImageOps.exif_transpose(image)))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever their parsing runs into
        raise damaged("image", error) from None


def _open(file: BinaryIO, limits: MediaLimits) -> Pillow.Image:
    try:
        image: Pillow.Image = Pillow.open(file, formats=_FORMATS)
    except UnidentifiedImageError:
        raise MediaFault(f"not an image of a known format ({', '.join(IMAGE_FORMATS)})", "invalid_image") from None
    except MemoryError:
        raise
    except Exception as error:
        raise damaged("image", error) from None
    width, height = image.size
    if width * height > limits.max_pixels:
        message = f"an image of {width}x{height} is larger than the limit of {limits.max_pixels} pixels"
        raise MediaFault(message, "image_too_large")
    return image


def _rgb(image: Pillow.Image) -> Pillow.Image:
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers without a known range")
    if image.mode.startswith("I"):  # 16 bits, in either byte order or widened: the upper 8 are what can be shown
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Pillow.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
        return Pillow.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")
