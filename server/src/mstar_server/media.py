"""Uploaded bytes → task parts: images as pixels, audio as samples, anything else as it is.

Limits are judged from a file's header, before anything is decoded. The first part of the media decoder: fetching by
URL, video and the containers that need ffmpeg come with the media routes.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, File, Image, Part
from mstar_server.options import ServerOptions

__all__ = ["array_from", "decode_audio", "decode_base64", "decode_file", "decode_image", "split_data_url"]

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_IMAGE_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
_AUDIO_MAGIC = (b"fLaC", b"OggS", b"RIFF", b"RF64")


def decode_file(data: bytes, name: str, media_type: str, param: str, options: ServerOptions) -> Part:
    """*data* as the part that its first bytes (not its name) say it is."""
    if data.startswith(_IMAGE_MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        return decode_image(data, param, options)
    if data.startswith(_AUDIO_MAGIC) and _has_soundfile():
        return decode_audio(data, param, options)
    return File(data, name, media_type)


def decode_image(data: bytes, param: str, options: ServerOptions) -> Image:
    """*data* as sRGB pixels, upright. Raises :class:`RequestError` for a damaged, unknown or too large image."""
    try:
        image: Pillow.Image = Pillow.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(_IMAGE_FORMATS)
        raise _bad(f"not an image of a known format ({known})", param, "invalid_image") from None
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise _bad(str(error), param, "image_too_large") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise _bad(f"the image is damaged: {error}", param, "invalid_image") from None
    width, height = image.size
    if width * height > options.max_pixels:
        message = f"an image of {width}x{height} is larger than the limit of {options.max_pixels} pixels"
        raise _bad(message, param, "image_too_large")
    try:
        return Image(np.asarray(_upright(image).convert("RGB")))
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise _bad(f"the image is damaged: {error}", param, "invalid_image") from None


def _upright(image: Pillow.Image) -> Pillow.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def decode_audio(data: bytes, param: str, options: ServerOptions) -> Audio:
    """*data* (WAV, FLAC, Ogg…) as mono float32 samples at the file's own rate."""
    if not _has_soundfile():
        raise _bad("audio cannot be decoded: this server needs 'pip install soundfile'", param, "unsupported_media")
    import soundfile  # type: ignore[import-untyped]

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            seconds = sound.frames / sound.samplerate
            if seconds > options.max_audio_s:
                message = f"audio of {seconds:.0f} s is longer than the limit of {options.max_audio_s:.0f} s"
                raise _bad(message, param, "audio_too_long")
            # at most the declared frames: a header that lies cannot make the decoder go on
            samples = sound.read(frames=sound.frames, dtype="float32", always_2d=True)
            return Audio(np.ascontiguousarray(samples.mean(axis=1)), sound.samplerate)
    except soundfile.LibsndfileError as error:
        raise _bad(
            f"the audio is damaged or of an unknown format: {error.error_string}", param, "invalid_audio"
        ) from None


def _has_soundfile() -> bool:
    return importlib.util.find_spec("soundfile") is not None


def decode_base64(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"not valid base64: {error}", param, "invalid_base64") from None


def split_data_url(url: str, param: str) -> tuple[str, bytes]:
    """``data:image/png;base64,…`` → media type and bytes. Any other URL is refused: this server fetches nothing."""
    head, comma, payload = url.partition(",")
    if not head.startswith("data:"):
        message = "this server does not fetch URLs; send the content as 'data:MEDIA/TYPE;base64,…'"
        raise _bad(message, param, "url_not_allowed")
    if not comma or not head.endswith(";base64"):
        raise _bad("a data URL must read 'data:MEDIA/TYPE;base64,…'", param, "invalid_value")
    return head[len("data:") : -len(";base64")], decode_base64(payload, param)


def _bad(message: str, param: str, code: str) -> RequestError:
    return RequestError(f"{param!r}: {message}", param=param, code=code)


def array_from(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...] | None, param: str) -> np.ndarray[Any, Any]:
    """An array from base64 (little-endian bytes) or (nested) numbers, as *shape* if given."""
    try:
        if isinstance(value, str):
            array = np.frombuffer(decode_base64(value, param), dtype.newbyteorder("<")).astype(dtype)
        else:
            array = np.asarray(value, dtype)
        return array if shape is None else array.reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad(str(error), param, "invalid_value") from None
