"""Pixels → a PNG file in milliseconds: one filter for all rows by numpy, compressed by ISA-L.

What writes PNG files (Pillow, FFmpeg, OpenCV, imagecodecs) compresses by zlib, which takes 25 to 70 ms for 1024 x 1024
pixels, a tenth and more of what models take to make them. ISA-L takes 4 to 10, and the files are smaller than zlib's at
its lowest level (``benchmarks/NOTES.md``, image_files). There is little else to a file: a head, and sums. Parts of a
picture are filtered and compressed beside each other: a server has most of its cores free while a model paints, and
whoever waits for a single picture waits for its file.

Source: W3C, Portable Network Graphics (Third Edition), sections 5 (chunks), 9 (filtering), 10 (compression); RFC 1950
and 1951 for a stream of blocks that end at bytes, and its sum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

__all__ = ["encode_png"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2, 4: 6}
"""Channels → the file's colour type: grey, RGB, RGB with transparency."""
_AVERAGE = 3
"""The filter: among the best for pictures of the world and of models."""
_LEVEL = 2
"""ISA-L's default. 1 takes as long for one per cent more bytes, 3 takes longer for none."""

_BAND = 1 << 18
"""Bytes that are filtered and compressed at a time, about. More at a time is faster by itself, but not in a server:
memory of megabytes that a thread gives back has to be made anew for the next picture, which takes as long as all the
rest."""
_PART = 1 << 19
"""Bytes from which on a part of a picture is worth a compressor of its own, which has half a megabyte to fill."""
_MOST_PARTS = 8

_ZLIB_HEAD = b"\x78\x01"
_ADLER = 65521


class _Part(NamedTuple):
    """Some rows: their compressed bytes, the sum of their filtered ones (RFC 1950's), and how many these are."""

    data: Sequence[bytes]
    check: int
    length: int


def encode_png(pixels: Any) -> bytes:
    """*pixels*: uint8 ``[H, W, 3]``, ``[H, W, 4]`` with transparency, or grey ``[H, W]``.

    :raises ValueError: they are something else, or there are none.
    """
    picture = np.ascontiguousarray(pixels)
    channels = 1 if picture.ndim == 2 else picture.shape[-1] if picture.ndim == 3 else 0
    if picture.dtype != np.uint8 or channels not in _COLOURS or not picture.size:
        raise ValueError(f"a PNG file is made of uint8 [H, W], [H, W, 3] or [H, W, 4], not {_described(picture)}")
    height, width = picture.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    check, data = 1, [_ZLIB_HEAD]
    for part in _parts(picture.reshape(height, -1), channels):
        check = _joined(check, part)
        data += part.data
    data.append(struct.pack(">I", check))
    return b"".join((_SIGNATURE, *_chunk(b"IHDR", [head]), *_chunk(b"IDAT", data), *_chunk(b"IEND", [])))


def _parts(rows: NDArray[np.uint8], channels: int) -> Iterable[_Part]:
    count = max(1, min(_cores(), rows.nbytes // _PART, len(rows)))
    edges = [len(rows) * number // count for number in range(count + 1)]

    def part(number: int) -> _Part:
        return _part(rows, edges[number], edges[number + 1], channels)

    return _threads().map(part, range(count)) if count > 1 else [part(0)]


def _cores() -> int:
    return min(_MOST_PARTS, os.cpu_count() or 1)


@cache
def _threads() -> ThreadPoolExecutor:
    """For the parts of all pictures."""
    return ThreadPoolExecutor(_cores(), "png")


def _part(rows: NDArray[np.uint8], begin: int, end: int, channels: int) -> _Part:
    """Rows from *begin* to *end*; behind the picture's last one the stream ends."""
    deflate = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)
    data, check, length = [], 1, 0
    for band in _filtered(rows, begin, end, channels):
        data.append(deflate.compress(band))
        check, length = isal_zlib.adler32(band, check), length + band.nbytes
    data.append(deflate.flush(isal_zlib.Z_FINISH if end == len(rows) else isal_zlib.Z_FULL_FLUSH))
    return _Part(data, check, length)


def _filtered(rows: NDArray[np.uint8], begin: int, end: int, channels: int) -> Iterator[NDArray[np.uint8]]:
    """Of each number its distance to the mean, rounded down, of those to its left and above it; the filter's number
    before each row. Band by band; each is good until the next is asked for."""
    length = rows.shape[1]
    each = min(end - begin, max(1, _BAND // length))
    filtered = np.empty((each, length + 1), np.uint8)
    filtered[:, 0] = _AVERAGE
    common = np.empty((each, length - channels), np.uint8)
    for first in range(begin, end, each):
        band = rows[first : min(first + each, end)]
        above = rows[first - 1 : first - 1 + len(band)]
        if not first:
            above = np.zeros_like(band)
            above[1:] = band[:-1]
        left, over, mean = band[:, :-channels], above[:, channels:], filtered[: len(band), 1:]
        np.right_shift(above[:, :channels], 1, out=mean[:, :channels])
        # half of where they differ, and where they agree: a sum would need a ninth bit
        inner, agreed = mean[:, channels:], common[: len(band)]
        np.bitwise_xor(left, over, out=inner)
        inner >>= 1
        np.bitwise_and(left, over, out=agreed)
        inner += agreed
        np.subtract(band, mean, out=mean)
        yield filtered[: len(band)]


def _joined(check: int, part: _Part) -> int:
    """The sum of what has *check* with *part* behind it: its lower half is that of all bytes, its upper half that of
    the lower one's values on the way."""
    low, high = check & 0xFFFF, check >> 16
    high += part.length * (low - 1) + (part.check >> 16)
    low += (part.check & 0xFFFF) - 1
    return high % _ADLER << 16 | low % _ADLER


def _chunk(kind: bytes, data: Sequence[bytes]) -> Iterator[bytes]:
    check, length = isal_zlib.crc32(kind), 0
    for part in data:
        check, length = isal_zlib.crc32(part, check), length + len(part)
    yield struct.pack(">I4s", length, kind)
    yield from data
    yield struct.pack(">I", check)


def _described(picture: NDArray[Any]) -> str:
    return f"{picture.dtype} {list(picture.shape)}"
