"""Pixels → a PNG file in milliseconds: one filter for all rows by numpy, compressed by ISA-L.

What writes PNG files (Pillow, FFmpeg, OpenCV, imagecodecs) compresses by zlib, which takes 25 to 70 ms for 1024 x 1024
pixels, a tenth and more of what models take to make them. ISA-L takes 4 to 10, and the files are smaller than zlib's at
its lowest level (``benchmarks/NOTES.md``, image_files). There is little else to a file: a head, and sums.

A picture is cut into bands of rows, each of which is filtered and compressed by itself, ends on a whole byte and has a
chunk of its own; together they are one stream. So idle threads can take some, and the file is the same whoever made
what.

Source: W3C, Portable Network Graphics (Third Edition), sections 5 (chunks), 9 (filtering), 10 (compression);
RFC 1950 and 1951, the stream, its sum and the empty blocks that end a part of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from mstar_server.media.encode.parallel import HELPERS

__all__ = ["png_parts"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2, 4: 6}
"""Channels → the file's colour type: grey, RGB, RGB with transparency."""
_AVERAGE = 3
"""The filter: among the best for pictures of the world and of models."""
_LEVEL = 2
"""ISA-L's default. 1 takes as long for one per cent more bytes, 3 takes longer for none."""

_BAND = 1 << 18
"""Bytes of a band, at most, unless a row has more. Larger ones are faster by themselves, but not in a server: memory of
megabytes that a thread gives back has to be made anew for the next picture, which takes as long as all the rest."""

_STREAM_BEGINS = b"\x78\x01"
_STREAM_ENDS = b"\x03\x00"
"""An empty block that says it is the last."""
_NOTHING = b"\x00\x00\x00\xff\xff"
"""An empty block that is not the last."""
_ADLER = 65521


class _Band(NamedTuple):
    """A part of the file, formed; of what is compressed in it the sum and the number of bytes."""

    part: bytes
    adler: int
    length: int


def png_parts(pixels: Any, form: Callable[[bytes], bytes] = bytes) -> list[bytes]:
    """A file in parts of at most some 256 KB: who sends them one by one never needs memory for all of it in one place,
    which would have to be made anew for each picture. Idle threads help.

    :param form: what becomes of each part, in the thread that makes it. All but the last have a multiple of three
        bytes, so base64 of each is base64 of the file.
    :param pixels: uint8 ``[H, W, 3]``, ``[H, W, 4]`` with transparency, or grey ``[H, W]``.
    :raises ValueError: they are something else, or there are none.
    """
    picture = np.ascontiguousarray(pixels)
    channels = 1 if picture.ndim == 2 else picture.shape[-1] if picture.ndim == 3 else 0
    if picture.dtype != np.uint8 or channels not in _COLOURS or not picture.size:
        raise ValueError(f"a PNG file is made of uint8 [H, W], [H, W, 3] or [H, W, 4], not {_described(picture)}")
    height, width = picture.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    rows = picture.reshape(height, -1)
    count = -(-height // max(1, _BAND // rows.shape[1]))
    each = -(-height // count)
    bands = HELPERS.map(lambda: _encoder(rows, channels, each, form), range(0, height, each))
    end = _STREAM_ENDS + struct.pack(">I", _joined(bands))
    first, last = [_SIGNATURE, *_chunk(b"IHDR", [head])], [*_chunk(b"IDAT", [end]), *_chunk(b"IEND", [])]
    return [form(b"".join(first)), *(band.part for band in bands), form(b"".join(last))]


def _encoder(
    rows: NDArray[np.uint8], channels: int, each: int, form: Callable[[bytes], bytes]
) -> Callable[[int], _Band]:
    """Makes the band of *each* rows that begins at the one it is given; one band at a time."""
    scratch = np.empty((each, rows.shape[1] + 1), np.uint8), np.empty((each, rows.shape[1] - channels), np.uint8)

    def encode(begin: int) -> _Band:
        filtered = _filtered(rows, channels, begin, *scratch)
        deflate = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, -isal_zlib.MAX_WBITS)
        data = [deflate.compress(filtered), deflate.flush(isal_zlib.Z_SYNC_FLUSH)]
        if not begin:
            data.insert(0, _STREAM_BEGINS)
        data += [_NOTHING] * (sum(map(len, data)) % 3)  # of five bytes; the rest of a chunk has twelve
        return _Band(form(b"".join(_chunk(b"IDAT", data))), isal_zlib.adler32(filtered), filtered.size)

    return encode


def _filtered(
    rows: NDArray[np.uint8], channels: int, begin: int, filtered: NDArray[np.uint8], common: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Of each number its distance to the mean, rounded down, of those to its left and above it; the filter's number
    before each row. From row *begin* on as many as *filtered* has place for; *common* is overwritten."""
    band = rows[begin : begin + len(filtered)]
    if begin:
        above = rows[begin - 1 : begin - 1 + len(band)]
    else:
        above = np.zeros_like(band)
        above[1:] = band[:-1]
    filtered = filtered[: len(band)]
    filtered[:, 0] = _AVERAGE
    left, over, mean = band[:, :-channels], above[:, channels:], filtered[:, 1:]
    np.right_shift(above[:, :channels], 1, out=mean[:, :channels])
    # half of where they differ, and where they agree: a sum would need a ninth bit
    inner, agreed = mean[:, channels:], common[: len(band)]
    np.bitwise_xor(left, over, out=inner)
    inner >>= 1
    np.bitwise_and(left, over, out=agreed)
    inner += agreed
    np.subtract(band, mean, out=mean)
    return filtered


def _joined(bands: Sequence[_Band]) -> int:
    """The sum of all bytes, of those of the *bands*."""
    low, high = 1, 0
    for band in bands:
        high = (high + (band.adler >> 16) + band.length * (low - 1)) % _ADLER
        low = (low + (band.adler & 0xFFFF) - 1) % _ADLER
    return high << 16 | low


def _chunk(kind: bytes, data: Sequence[bytes]) -> list[bytes]:
    check, length = isal_zlib.crc32(kind), 0
    for part in data:
        check, length = isal_zlib.crc32(part, check), length + len(part)
    return [struct.pack(">I4s", length, kind), *data, struct.pack(">I", check)]


def _described(picture: NDArray[Any]) -> str:
    return f"{picture.dtype} {list(picture.shape)}"
