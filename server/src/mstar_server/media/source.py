"""A file to be decoded, as something that a decoder's process can be handed: a descriptor, and its first bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from starlette.datastructures import UploadFile

from mstar_server.media.kinds import HEAD_BYTES
from mstar_server.media.output import anonymous_file

__all__ = ["Source"]

_LARGE_BYTES = 1 << 20
"""From this size on, copying happens in a thread."""


class Source:
    """Owns the descriptor *fd* of a file of *size* bytes: :meth:`close` it, or drop the last reference to it.

    The bytes lie in memory that the kernel frees with the descriptor, or in the file that an upload was spooled to.
    """

    def __init__(self, fd: int):
        self.fd, self.size = fd, os.fstat(fd).st_size

    @classmethod
    async def of_bytes(cls, *pieces: bytes) -> Source:
        if sum(map(len, pieces)) < _LARGE_BYTES:
            return _written(pieces)
        return await asyncio.to_thread(_written, pieces)

    @classmethod
    async def of_upload(cls, upload: UploadFile) -> Source:
        """An upload of a form. What was spooled to disk stays there and is not read into memory."""
        if getattr(upload.file, "_rolled", True):  # else asking for a descriptor would write it to disk
            return cls(os.dup(upload.file.fileno()))
        await upload.seek(0)
        return await cls.of_bytes(await upload.read())

    def head(self) -> bytes:
        return os.pread(self.fd, HEAD_BYTES, 0)

    def read(self) -> bytes:
        """All of it."""
        pieces, offset = [], 0
        while piece := os.pread(self.fd, self.size - offset, offset):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _written(pieces: Sequence[bytes]) -> Source:
    fd = anonymous_file()
    try:
        for piece in pieces:
            data = memoryview(piece)
            while data:
                data = data[os.write(fd, data) :]
        return Source(fd)
    except BaseException:
        os.close(fd)
        raise
