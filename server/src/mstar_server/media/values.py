"""Bytes and arrays inside JSON: base64, data URLs, lists of numbers."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError

__all__ = ["array_from", "decode_base64", "split_data_url", "split_frames_url"]


def decode_base64(text: str, param: str) -> bytes:
    """The bytes that *text* stands for; refused by *param* if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad(f"not valid base64: {error}", param, "invalid_base64") from None


def split_data_url(url: str, param: str) -> tuple[str, bytes]:
    """``data:image/png;base64,…`` → media type and bytes."""
    media_type, payload = _split(url, param)
    return media_type, decode_base64(payload, param)


def split_frames_url(url: str, param: str) -> list[bytes] | None:
    """``data:video/jpeg;base64,FRAME,FRAME…`` → the files of its frames; ``None`` for any other URL."""
    if not url[:32].startswith("data:video/jpeg;"):
        return None
    return [decode_base64(frame, param) for frame in _split(url, param)[1].split(",")]


def _split(url: str, param: str) -> tuple[str, str]:
    head, comma, payload = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise _bad("a data URL must read 'data:MEDIA/TYPE;base64,…'", param, "invalid_value")
    return head[len("data:") : -len(";base64")].partition(";")[0], payload


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
