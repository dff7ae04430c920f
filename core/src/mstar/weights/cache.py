"""A cache folder whose entries are built once, by one process, and appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mstar.spec.errors import WeightsError

__all__ = ["build_once"]


def build_once(target: Path, build: Callable[[Path], Path], say: Callable[[str], None]) -> Path:
    """Return folder *target*, built first if it is not there.

    *build* receives an empty work folder beside *target* and returns the folder in it that becomes *target*. A lock
    keeps other processes and threads from building the same entry; whatever happens, the next call finds either a whole
    entry or none, and clears what a killed process left behind.

    :raises WeightsError: when the disk does not play along (full, read-only).
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, say):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise WeightsError(f"cannot prepare {target}: {error}") from error
    return target


def _build(target: Path, build: Callable[[Path], Path]) -> None:
    work = target.with_name(target.name + ".partial")
    if work.exists():  # left by a process that was killed: we hold the lock, so nobody is using it
        shutil.rmtree(work)
    work.mkdir()
    try:
        built = build(work)
        _flush(built)
        built.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(target: Path, say: Callable[[str], None]) -> Iterator[None]:
    # The lock's file stays: removing it would let two processes lock two files of one name.
    lock = FileLock(target.with_name(target.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process is preparing {target.name}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _flush(folder: Path) -> None:
    """Have *folder*'s files on the disk before the rename, so that a power cut cannot leave a whole-looking entry."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
