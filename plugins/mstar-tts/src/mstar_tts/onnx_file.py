"""Reads the nodes and constants of an ONNX file, which is a protocol buffer, without the ``onnx`` package.

Sources: ONNX's ``onnx.proto`` (field numbers of ModelProto, GraphProto, NodeProto and TensorProto), and the wire format
of protocol buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mstar.spec.errors import WeightsError

__all__ = ["OnnxGraph", "OnnxNode", "read_onnx"]

_DTYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class OnnxNode:
    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxGraph:
    """*constants*: initialisers by name."""

    nodes: tuple[OnnxNode, ...]
    constants: dict[str, NDArray[Any]]


def read_onnx(data: bytes | memoryview) -> OnnxGraph:
    """The graph of a model's file. Tensors are views into *data*.

    :raises WeightsError: it is no ONNX file, or a tensor is stored in a way that is not known here.
    """
    try:
        (graph,) = (value for field, value in _fields(memoryview(data)) if field == 7)
        nodes, constants = [], {}
        for field, value in _fields(graph):
            if field == 1:
                nodes.append(_node(value))
            elif field == 5:
                name, tensor = _tensor(value)
                constants[name] = tensor
    except (ValueError, IndexError, TypeError, UnicodeDecodeError) as error:
        raise WeightsError(f"this is not an ONNX file that can be read: {error}") from error
    return OnnxGraph(tuple(nodes), constants)


def read_parts(files: list[Path]) -> OnnxGraph:
    """The graph of a file that is cut into *files*."""
    return read_onnx(b"".join(file.read_bytes() for file in files))


def _node(data: memoryview) -> OnnxNode:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: []}
    for field, value in _fields(data):
        if field in texts:
            texts[field].append(bytes(value).decode())
    return OnnxNode("".join(texts[3]), "".join(texts[4]), tuple(texts[1]), tuple(texts[2]))


def _tensor(data: memoryview) -> tuple[str, NDArray[Any]]:
    dims: list[int] = []
    listed: list[int] = []
    name, kind, raw = "", 0, None
    for field, value in _fields(data):
        if field == 1:
            dims += _integers(value)
        elif field == 2:
            kind = value
        elif field == 8:
            name = bytes(value).decode()
        elif field == 9 or (field == 4 and not isinstance(value, int)):  # packed floats are bytes too
            raw = value
        elif field in (5, 7):
            listed += (number - (1 << 64) if number >> 63 else number for number in _integers(value))
        elif field in (4, 10, 11, 13):
            raise ValueError(f"tensor {name!r} is stored in a way that is not known here (field {field})")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name!r} is of a type that is not known here ({kind})")
    if listed:
        return name, np.array(listed).astype(_DTYPES[kind]).reshape(dims)
    return name, np.frombuffer(b"" if raw is None else raw, _DTYPES[kind]).reshape(dims)


def _integers(value: Any) -> list[int]:
    """A repeated integer: packed, or one at a time."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Field numbers and values: integers, or the bytes of texts, tensors and messages."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
