"""Large arrays between two processes: one file each in a private folder of shared memory.

Ownership: the sender creates a file and names it in its message; the receiver maps it and unlinks it at once, so that
the memory is freed with the last view of it. What a dead peer left behind goes with the folder. The folder's owner
holds a lock on it for as long as it lives, so that a later process recognises the folder of one that was killed: it has
its name only once it is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Arena"]

_PREFIX, _UNLOCKED = "mstar-arena-", "mstar-arena-new-"  # in the temporary folder others may begin with mstar-
_ROOT = Path("/dev/shm")
_YOUNG_S = 60.0  # how long a folder may be without its lock after it was made


class Arena:
    """A private folder (mode 0700) that two processes exchange large buffers through.

    :meth:`create` makes one (and removes those of dead owners); the peer opens it by path with the constructor. Where
    both peers do so, each has a name of its own for its *end*.
    """

    def __init__(self, path: Path, lock: int | None = None, end: str = "p"):
        self.path = path
        self._lock = lock
        self._prefix = "o" if lock is not None else end  # no two ends pick the same name
        self._numbers = itertools.count()

    @classmethod
    def create(cls, root: Path | None = None) -> Arena:
        """Make a folder under *root* (default: shared memory where the system has it, else the temporary folder)."""
        root = root or (_ROOT if os.access(_ROOT, os.W_OK) else Path(tempfile.gettempdir()))
        for path in _abandoned(root):
            shutil.rmtree(path, ignore_errors=True)  # another process may be sweeping it too
        new = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=root))
        lock = os.open(new, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(new.rename(root / new.name.replace(_UNLOCKED, _PREFIX, 1)), lock)

    def write(self, data: memoryview) -> str | None:
        """Store *data* (bytes, contiguous) and return its name, or ``None`` when shared memory is full."""
        name = f"{self._prefix}{next(self._numbers)}"
        try:
            self._write(name, data)
        except OSError as error:
            self.discard(name)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                return None
            raise
        return name

    def _write(self, name: str, data: memoryview) -> None:
        # Written, not mapped: a store into a mapping of a full file system kills the process with SIGBUS.
        fd = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)  # full of files, perhaps
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)

    def take(self, name: str, size: int) -> mmap.mmap:
        """Map what the peer stored as *name* (*size* bytes) and unlink it: the caller now owns the only copy."""
        path = self.path / name
        fd = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
            os.unlink(path)
        return mapped

    def discard(self, name: str) -> None:
        """Remove a stored buffer that will not be sent after all."""
        with contextlib.suppress(FileNotFoundError):  # the peer took it
            os.unlink(self.path / name)

    def remove(self) -> None:
        """Remove the folder and all in it. Mapped buffers stay valid."""
        shutil.rmtree(self.path, ignore_errors=True)  # the peer may be removing it too
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _abandoned(root: Path) -> Iterator[Path]:
    """Our own folders under *root* whose owner lives no more."""
    for path in root.glob(_PREFIX + "*"):
        try:
            info = path.lstat()
            young = path.name.startswith(_UNLOCKED) and time.time() - info.st_mtime < _YOUNG_S
            if info.st_uid != os.getuid() or young:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not a folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
        yield path
