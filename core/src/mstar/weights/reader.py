"""Bytes of files into tensors, by a few threads: each reads a block, then brings it to its destination.

Files are read, not mapped: mapped pages would count as this process's memory. What needs no cast is read straight into
its destination on the CPU. All else goes through host buffers. For a CUDA device they are pinned, and each has a stream
of its own with a staging buffer on the device: while some blocks are read, others are on their way over the bus, and
the device casts and places the rows of those that have arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from mstar.spec.errors import WeightsError

__all__ = ["Piece", "read_pieces"]

_BLOCK = 8 << 20
"""Bytes of one read, and of one buffer."""

_THREADS = 8
"""Reads at once: disks and file systems need several to be fast."""

_HOST_SLOTS, _CUDA_SLOTS = 6, 2 * _THREADS
"""Buffers. One that was handed to a device is busy for a while after its thread has gone on to the next."""

_SERIAL = (1 << 15) - 64
"""Elements of a copy that torch does without its OpenMP threads, of which each reading thread would get a team."""


@dataclass(frozen=True)
class Piece:
    """Elements of *dtype* (little-endian, row-major) from byte *start* of *file* on fill *destination*, which may have
    another dtype and be on another device.

    :param stride: bytes from one row of *destination* (an item along its first dimension) to the next in the file, of
        which only the row's own are read; 0: they follow each other.
    """

    file: Path
    start: int
    dtype: torch.dtype
    destination: Tensor
    stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.destination.numel() * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """Its bytes are its destination's."""
        to = self.destination
        return to.device.type == "cpu" and to.dtype == self.dtype and to.is_contiguous()


@dataclass
class _Read:
    """Neighbours in one file that are read together."""

    file: Path
    start: int
    nbytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def takes(self, piece: Piece) -> bool:
        if not self.pieces:
            return True
        if piece.stride or self.pieces[0].stride:
            return False
        follows = piece.file == self.file and piece.start == self.start + self.nbytes
        aligned = self.nbytes % piece.dtype.itemsize == 0
        together = not piece.direct and not self.pieces[0].direct
        return follows and aligned and together and self.nbytes + piece.nbytes <= _BLOCK

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.nbytes += piece.nbytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """First byte in the file, and how many from there on; one run after the other is what is read."""
        stride, rows = self.pieces[0].stride, self.pieces[0].destination.shape[:1]
        if not stride:
            yield self.start, self.nbytes
            return
        each = self.nbytes // rows[0]
        for row in range(rows[0]):
            yield self.start + row * stride, each

    def values(self, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(destination, its values) of each piece; *data*: the bytes that were read."""
        for piece in self.pieces:
            at = 0 if piece.stride else piece.start - self.start
            found = data[at : at + piece.nbytes].view(piece.dtype)
            yield piece.destination, found.view(piece.destination.shape)


def read_pieces(pieces: Iterable[Piece], progress: Callable[[int], None]) -> None:
    """Fill every destination. All are on one device. *progress* is told the bytes done after each read.

    :raises WeightsError: a file ends early or cannot be read; what was filled until then stays filled.
    """
    reads = list(_reads(pieces))
    slots = _slots([read for read in reads if not read.pieces[0].direct])
    free: SimpleQueue[_Slot] = SimpleQueue()
    for slot in slots:
        free.put(slot)
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
    done = 0
    try:
        jobs = [pool.submit(_transfer, read, free) for read in reads]
        for read, job in zip(reads, jobs, strict=True):
            job.result()
            done += read.nbytes
            progress(done)
    finally:
        pool.shutdown(cancel_futures=True)
        for slot in slots:
            slot.wait()


def _transfer(read: _Read, free: SimpleQueue[_Slot]) -> None:
    """In a reading thread: bring *read* to its destinations."""
    if read.pieces[0].direct:
        to = read.pieces[0].destination.detach()
        _fill(to.as_strided((to.numel(),), (1,)).view(torch.uint8), read)  # a view() keeps a lone element's stride
        return
    slot = free.get()
    try:
        slot.wait()
        _fill(slot.buffer[: read.nbytes], read)
        with torch.no_grad():
            slot.land(read)
    finally:
        free.put(slot)


def _fill(target: Tensor, read: _Read) -> None:
    """Get *read*'s bytes into *target*, uint8 ``[nbytes]`` in host memory."""
    into = memoryview(target.numpy().data)
    try:
        with read.file.open("rb", buffering=0) as file:
            for start, nbytes in read.runs():
                run, into = into[:nbytes], into[nbytes:]
                while len(run):
                    got = os.preadv(file.fileno(), [run], start + nbytes - len(run))
                    if not got:
                        raise WeightsError(
                            f"{read.file} ({read.file.stat().st_size:,} bytes) is damaged or truncated: it ends before "
                            f"byte {start + nbytes:,}, which its header promises"
                        )
                    run = run[got:]
    except OSError as error:
        raise WeightsError(f"{read.file} cannot be read: {error}") from error


class _Slot:
    """A host buffer that holds one read at a time, and the way from there to the destinations."""

    def __init__(self, nbytes: int):
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)

    def wait(self) -> None:
        """Return when what the buffer held is where it belongs."""

    def land(self, read: _Read) -> None:
        """Bring what the buffer holds to *read*'s destinations."""
        for destination, values in read.values(self.buffer):
            if destination.device.type != "cpu" or not destination.is_contiguous():
                destination.copy_(values)
                continue
            parts = torch.split(destination.view(-1), _SERIAL)
            for part, found in zip(parts, torch.split(values.view(-1), _SERIAL), strict=True):
                part.copy_(found)


class _CudaSlot(_Slot):
    def __init__(self, nbytes: int, device: torch.device):
        self.buffer = _pinned(nbytes)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # the memory of staging and destinations may still be in use by work that was queued before they were made
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._stream.synchronize()

    def land(self, read: _Read) -> None:
        with torch.cuda.stream(self._stream):
            self._staging[: read.nbytes].copy_(self.buffer[: read.nbytes], non_blocking=True)
            for destination, values in read.values(self._staging):
                destination.copy_(values)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _slots(reads: list[_Read]) -> list[_Slot]:
    if not reads:
        return []
    device = reads[0].pieces[0].destination.device
    size = max(read.nbytes for read in reads)
    if device.type == "cuda":
        return [_CudaSlot(size, device) for _ in range(min(_CUDA_SLOTS, len(reads)))]
    return [_Slot(size) for _ in range(min(_HOST_SLOTS, len(reads)))]


def _reads(pieces: Iterable[Piece]) -> Iterator[_Read]:
    """Cut and group *pieces* into reads of about one block each, in the files' order."""
    read: _Read | None = None
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
        for part in _cut(piece):
            if read is None or not read.takes(part):
                if read is not None:
                    yield read
                read = _Read(part.file, part.start)
            read.add(part)
    if read is not None:
        yield read


def _cut(piece: Piece) -> Iterator[Piece]:
    """Parts of at most a block. A destination that is contiguous is cut anywhere, another along its rows."""
    to, size = piece.destination, piece.dtype.itemsize
    if to.numel() == 0:
        return
    if piece.stride:
        rows = max(1, _BLOCK // (size * to[0].numel()))
        for number, part in enumerate(torch.split(to, rows)):
            yield Piece(piece.file, piece.start + number * rows * piece.stride, piece.dtype, part, piece.stride)
        return
    if piece.nbytes <= _BLOCK:
        yield piece
        return
    flat = to.view(-1) if to.is_contiguous() else to
    row = size * flat[0].numel()
    if row > _BLOCK and flat.dim() > 1:
        for number, part in enumerate(flat):
            yield from _cut(Piece(piece.file, piece.start + number * row, piece.dtype, part))
        return
    rows = max(1, _BLOCK // row)
    for number, part in enumerate(torch.split(flat, rows)):
        yield Piece(piece.file, piece.start + number * rows * row, piece.dtype, part)
