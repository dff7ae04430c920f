"""What a client says on ``/generate/ws``: opening messages and, for requests in flight, appends, ends and cancels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mstar.spec.errors import RequestError, nearest
from mstar.spec.tasks import Text
from mstar_server.media.values import array_from
from mstar_server.native.request import GenerateBody, NativeRequest, from_json, unknown_field
from mstar_server.options import ServerOptions

__all__ = ["Append", "Follow", "Opening", "parse_follow", "parse_opening"]

_FOLLOW = ("id", "append", "end_input", "cancel")
_OPENING = (*(name for name in GenerateBody.model_fields if name != "streaming"), "live", *_FOLLOW[:-1])
_DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass(frozen=True)
class Append:
    """Items for one stream: a numpy array, or a :class:`~mstar.spec.tasks.Text`."""

    stream: str
    data: Any


@dataclass(frozen=True)
class Follow:
    """What a message asks of a request in flight. *end*: the streams to close, all of them if ``True``."""

    appends: tuple[Append, ...] = ()
    end: bool | str = False
    cancel: bool = False


@dataclass(frozen=True)
class Opening:
    """A new request, the client streams that it keeps open, and what is sent along at once."""

    native: NativeRequest
    live: tuple[str, ...]
    follow: Follow


def parse_opening(message: Mapping[str, Any], options: ServerOptions) -> Opening:
    """The first message of a request: its body, the streams that stay open, and what goes into them at once."""
    stray = next((unknown_field(name, _OPENING) for name in message if name not in _OPENING), None)
    body = {name: value for name, value in message.items() if name in GenerateBody.model_fields and name in _OPENING}
    live = message.get("live", [])
    if not (isinstance(live, list) and all(isinstance(name, str) for name in live)):
        raise RequestError("'live' must be a list of stream names", param="live")
    follow = parse_follow({name: message[name] for name in ("append", "end_input") if name in message})
    return Opening(replace(from_json(body, options), stray=stray), tuple(live), follow)


def parse_follow(message: Mapping[str, Any]) -> Follow:
    """A later message of a request: items of streams, their end, or a cancel."""
    _known(message, _FOLLOW)
    append, end, cancel = message.get("append", {}), message.get("end_input", False), message.get("cancel", False)
    if not isinstance(append, dict):
        raise RequestError("'append' must be an object: {stream: items}", param="append")
    if not isinstance(end, bool | str):
        raise RequestError("'end_input' must be true or a stream's name", param="end_input")
    if not isinstance(cancel, bool):
        raise RequestError("'cancel' must be true", param="cancel")
    return Follow(tuple(_append(name, value) for name, value in append.items()), end, cancel)


def _append(stream: str, value: Any) -> Append:
    """A list of numbers (float32), a string of text, or ``{"data": base64, bytes or list, "dtype", "shape"}``."""
    param = f"append.{stream}"
    if isinstance(value, str):
        return Append(stream, Text(value))
    if isinstance(value, list):
        return Append(stream, array_from(value, np.dtype("float32"), None, param))
    if not isinstance(value, dict) or "data" not in value:
        message = f"{param!r} must be a list, a text, or {{'data': base64 or list, 'dtype': …, 'shape': […]}}"
        raise RequestError(message, param=param)
    _known(value, ("data", "dtype", "shape"), f"{param}.")
    dtype, shape = value.get("dtype", "float32"), value.get("shape")
    if dtype not in _DTYPES:
        raise RequestError(f"'{param}.dtype': unknown{nearest(str(dtype), _DTYPES)}", param=f"{param}.dtype")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)):
        raise RequestError(f"'{param}.shape' must be a list of sizes", param=f"{param}.shape")
    data, sizes = value["data"], None if shape is None else tuple(shape)
    if isinstance(data, bytes):
        return Append(stream, _from_bytes(data, np.dtype(dtype), sizes, param))
    if not isinstance(data, str | list):
        raise RequestError(f"'{param}.data' must be base64, a list or, in msgpack, bytes", param=f"{param}.data")
    return Append(stream, array_from(data, np.dtype(dtype), sizes, param))


def _from_bytes(
    data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...] | None, param: str
) -> np.ndarray[Any, np.dtype[Any]]:
    """An array of its own from little-endian bytes."""
    try:
        array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
        return array if shape is None else array.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{param!r}: {error}", param=param) from None


def _known(message: Mapping[str, Any], names: Sequence[str], where: str = "") -> None:
    for name in message:
        if name not in names:
            raise unknown_field(name, names, where)
