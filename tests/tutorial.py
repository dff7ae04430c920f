"""Runs a tutorial: its blocks one after the other, as they are printed.

What a block is follows from its language:

- ``sh``: commands, run by bash where the last block's ``cd`` led. ``<!-- test: fails -->`` above it: they must end with
  an error. ``<!-- test: serves -->``: it is a server, left running in the background once it is ready.
- ``text``: what the commands above print. Every line must be there, in this order; ``…`` stands for anything, and runs
  of spaces count as one.
- ``diff``: a change of the file that the line above names, without line numbers.
- ``python``, ``yaml``: the content of the file that the line above names.

``<!-- test: skip -->`` above a block: it is an example that the reader does not follow.
``<!-- test: stop -->`` is where the reader presses Ctrl-C.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

__all__ = ["Block", "Reader", "read_blocks"]

_FENCE = re.compile(r"```(\w+)$")
_MARK = re.compile(r"<!-- test: (\w+) -->$")
_NAMED = re.compile(r"`([^`]+)`:$")
_SERVER = re.compile(r"http://[\d.]+:\d+")


@dataclass(frozen=True)
class Block:
    """One block. *line*: where it begins in the page. *file*: named above it. *mark*: what a comment above it says."""

    line: int
    language: str
    text: str
    file: str | None = None
    mark: str | None = None


def read_blocks(page: str) -> list[Block]:
    """All blocks of *page*, and the places to stop as blocks of language ``stop``."""
    found: list[Block] = []
    above, mark = "", None
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        if comment := _MARK.match(line):
            mark = comment[1]
            if mark == "stop":
                found.append(Block(number, "stop", ""))
                mark = None
        elif fence := _FENCE.match(line):
            text = []
            for _, inside in lines:
                if inside == "```":
                    break
                text.append(inside + "\n")
            else:
                raise AssertionError(f"line {number}: the block has no end")
            named = _NAMED.search(above)
            found.append(Block(number + 1, fence[1], "".join(text), named and named[1], mark))
            above, mark = "", None
        elif line.strip():
            assert not line.startswith("```"), f"line {number}: a block without a language"
            above = line
    return found


class Reader:
    """Somebody who does what a tutorial says, in *folder*, with *environ*. Close it, and its server ends."""

    def __init__(self, folder: Path, environ: Mapping[str, str]):
        self.here, self.environ = folder, environ
        self.printed = ""
        self._server: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"
        self._pwd = folder / "pwd"

    def do(self, block: Block) -> None:
        """Do what *block* says. Raises ``AssertionError`` when it does not come out as the page has it."""
        match block.language:
            case _ if block.mark == "skip":
                pass
            case "sh" if block.mark == "serves":
                self._serve(block.text)
            case "sh":
                self._run(block.text, fails=block.mark == "fails")
            case "text":
                self._compare(block.text)
            case "diff":
                self._change(self._file(block), block.text)
            case "python" | "yaml":
                self._file(block).write_text(block.text, encoding="utf-8")
            case "stop":
                self.stop()
            case other:
                raise AssertionError(f"nobody knows what to do with a block of {other!r}")

    def _file(self, block: Block) -> Path:
        assert block.file is not None, "the line above the block names no file"
        return self.here / block.file

    def _run(self, commands: str, fails: bool) -> None:
        script = f"set -e\n{commands}\npwd > '{self._pwd}'\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.here,
            env=self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=180,
            check=False,
        )
        self.printed = done.stdout
        assert (done.returncode != 0) == fails, f"exit status {done.returncode}:\n{self.printed}"
        if not fails:
            self.here = Path(self._pwd.read_text().strip())

    def _compare(self, shown: str) -> None:
        printed = " ".join(self.printed.split())
        for line in filter(None, map(str.strip, shown.splitlines())):
            pattern = ".*?".join(re.escape(" ".join(part.split())) for part in line.split("…"))
            match = re.search(pattern, printed)
            assert match is not None, f"{line!r} is not, or not at this place, in what was printed:\n{self.printed}"
            printed = printed[match.end() :]

    @staticmethod
    def _change(file: Path, diff: str) -> None:
        lines = diff.splitlines()
        assert all(not line or line[0] in " +-" for line in lines), f"no line of a diff: {diff}"
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file.name} has this {text.count(old)} times:\n{old}\nIt is:\n{text}"
        file.write_text(text.replace(old, new), encoding="utf-8")

    # --- the server ---------------------------------------------------------------------------------------------------

    def _serve(self, command: str) -> None:
        assert self._server is None, "the last server has not been stopped"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command.strip()}"],
                cwd=self.here,
                env=self.environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            self.printed = self._log.read_text()
            assert self._server.poll() is None, f"the server has ended:\n{self.printed}"
            found = _SERVER.search(self.printed)
            if found is not None and _is_ready(found[0]):
                self.printed = self._log.read_text()
                return
            time.sleep(0.1)
        raise AssertionError(f"the server is not ready after 90 s:\n{self.printed}")

    def stop(self) -> None:
        """Press Ctrl-C."""
        assert self._server is not None, "no server is running"
        server, self._server = self._server, None
        server.send_signal(signal.SIGINT)
        status = server.wait(60)
        assert status in (0, 130), f"the server ended with {status}:\n{self._log.read_text()}"

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
