"""Where decoded samples and pixels go: a file without a name, in memory, that another process can map."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from typing import Any

import msgspec
import numpy as np

from mstar_server.media.limits import MediaFault

__all__ = ["ArrayRef", "Decoded", "Output", "anonymous_file", "map_array"]

_MAPPED_BYTES = 1 << 20
"""From this size on an array is mapped instead of copied."""


class ArrayRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array in an output file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Decoded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decoder made. *frames* is uint8 ``[H, W, 3]`` of an image, ``[frames, H, W, 3]`` of a video; *samples* is
    float32 ``[samples]``. An image has no *fps*. *times*: of a video whose frames are spread, seconds of each;
    *resized*: they were brought to the size that the model wants."""

    frames: ArrayRef | None = None
    fps: float | None = None
    times: tuple[float, ...] = ()
    resized: bool = False
    samples: ArrayRef | None = None
    rate: int = 0


class Output:
    """Appends to the file *fd*, at most *limit* bytes: more is a :class:`MediaFault`."""

    def __init__(self, fd: int, limit: int):
        self.fd, self.size, self._limit = fd, 0, limit

    def write(self, array: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        if self.size + len(data) > self._limit:
            message = f"the file decodes to more than the limit of {self._limit} bytes"
            raise MediaFault(message, "decoded_too_large", 413)
        while data:
            written = os.pwrite(self.fd, data, self.size)
            self.size, data = self.size + written, data[written:]

    def back_to(self, start: int) -> None:
        """Forget what was written from byte *start* on."""
        self.size = start
        os.ftruncate(self.fd, start)

    def keep_every_second(self, start: int, item_bytes: int, count: int) -> int:
        """Of the *count* items from *start* to the end, drop those with odd numbers; gives the number that is left."""
        for number in range(2, count, 2):
            item = os.pread(self.fd, item_bytes, start + number * item_bytes)
            os.pwrite(self.fd, item, start + number // 2 * item_bytes)
        left = (count + 1) // 2
        self.size = start + left * item_bytes
        os.ftruncate(self.fd, self.size)
        return left


def anonymous_file() -> int:
    """A file descriptor that only this process knows; its memory is freed when the last descriptor is closed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mstar-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_array(fd: int, ref: ArrayRef) -> np.ndarray[Any, Any]:
    """The array at *ref*; writing to it leaves the file as it is. Raises ``ValueError`` if it is not all there."""
    dtype = np.dtype(ref.dtype)
    items = 1
    for length in ref.shape:
        items *= length
    size, end = items * dtype.itemsize, ref.offset + items * dtype.itemsize
    if min(ref.shape, default=0) < 0 or ref.offset < 0 or end > os.fstat(fd).st_size:
        raise ValueError(f"the output has no array of shape {ref.shape} at {ref.offset}")
    if size < _MAPPED_BYTES:
        data: Any = bytearray(os.pread(fd, size, ref.offset))
        return np.frombuffer(data, dtype).reshape(ref.shape)
    if hasattr(fcntl, "F_ADD_SEALS"):  # a page that is cut off under the mapping would kill this process
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    start = ref.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    data = mmap.mmap(fd, end - start, access=mmap.ACCESS_COPY, offset=start)
    return np.frombuffer(data, dtype, items, ref.offset - start).reshape(ref.shape)
