"""The tutorial "Write a family", done from its first block to its last, as printed.

What is not as printed, because tests have no network:

- The virtual environment of the first block is one that shares this one's libraries.
- pip takes M* from wheels built here; its environment variables say so, and every ``pip`` line is the printed one.
- The server listens on a free port instead of 8000.
- On a machine without ``curl`` a few lines of Python stand in for it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .installing import Environment, build_wheel
from .tutorial import Reader, read_blocks

PAGE = Path(__file__).parent.parent / "docs" / "write-a-family.md"
VENV = "python3 -m venv .venv\n. .venv/bin/activate\n"
LIBRARIES = ("pip", "setuptools", "pytest", "httpx", "openai")  # what the page needs beside M*

CURL = """#!{python}
import argparse, httpx
parser = argparse.ArgumentParser()
for flag in ("-H", "-d"):
    parser.add_argument(flag)
parser.add_argument("-s", action="store_true")
parser.add_argument("url")
words = parser.parse_args()
print(httpx.post(words.url, content=words.d.encode(), headers=[words.H.split(": ", 1)], timeout=60).text)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A person with M*'s wheels at hand and an empty folder."""
    wheels, desk = tmp_path / "wheels", tmp_path / "desk"
    for folder in (wheels, desk, tmp_path / "environment"):
        folder.mkdir()
    for name in ("mstar-core", "mstar-server"):
        build_wheel(name, wheels)
    environment = Environment(tmp_path / "environment", wheels, "mstar-core", *LIBRARIES)
    python = environment.bin / "python"
    scripts = {name: f'#!/bin/sh\nexec {python} -m {name} "$@"\n' for name in ("pip", "pytest")}
    if shutil.which("curl") is None:
        scripts["curl"] = CURL.format(python=python)
    for name, text in scripts.items():
        (environment.bin / name).write_text(text)
        (environment.bin / name).chmod(0o755)
    environ = environment.environ(
        CUDA_VISIBLE_DEVICES="",  # the printed sizes are those of a CPU
        PATH=f"{environment.bin}{os.pathsep}{os.environ['PATH']}",
        MSTAR_CONFIG=str(tmp_path / "config"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
        PIP_NO_BUILD_ISOLATION="0",  # pip's word for "do not isolate"
        PIP_NO_CACHE_DIR="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    person = Reader(desk, environ)
    yield person
    person.close()


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.install
def test_every_block_runs_as_printed(reader: Reader, port: str) -> None:
    start = reader.here
    blocks = read_blocks(PAGE.read_text(encoding="utf-8"))
    assert blocks[0].text.startswith(VENV)
    blocks[0] = replace(blocks[0], text=blocks[0].text.removeprefix(VENV))
    for block in blocks:
        try:
            reader.do(replace(block, text=block.text.replace("8000", port)))
        except AssertionError as fault:
            fault.add_note(f"{PAGE.name}, line {block.line}:\n{block.text}")
            raise
    for words in (["check"], ["format", "--check"]):  # what the reader has made is as tidy as what they were given
        ruff = [sys.executable, "-m", "ruff", *words, "--no-cache", str(start / "mstar-translator")]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- the reader notices ----------------------------------------------------------------------------------------------

FAULTS = {
    "a command that fails": ("```sh\nfalse\ntrue\n```\n", "exit status 1"),
    "a command that should fail": ("<!-- test: fails -->\n```sh\ntrue\n```\n", "exit status 0"),
    "another output": ("```sh\necho one two\n```\n```text\none three\n```\n", "'one three' is not"),
    "another order": ("```sh\necho one; echo two\n```\n```text\ntwo\none\n```\n", "'one' is not"),
    "a change of what is not there": ("In `file`:\n\n```diff\n-other\n+new\n```\n", "0 times"),
    "a change without its file": ("```diff\n-old\n+new\n```\n", "names no file"),
    "no diff": ("In `file`:\n\n```diff\nold\n```\n", "no line of a diff"),
    "a language that nobody runs": ("```rust\n```\n", "nobody knows"),
    "a block without a language": ("```\ntrue\n```\n", "without a language"),
    "a block without an end": ("```sh\ntrue\n", "has no end"),
    "a server that ends": ("<!-- test: serves -->\n```sh\nfalse\n```\n", "the server has ended"),
    "nothing to stop": ("<!-- test: stop -->\n", "no server is running"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_page_that_is_wrong_is_noticed(name: str, tmp_path: Path) -> None:
    page, sentence = FAULTS[name]
    (tmp_path / "file").write_text("old\n")
    with pytest.raises(AssertionError, match=sentence):
        follow(page, Reader(tmp_path, os.environ))


def follow(page: str, person: Reader) -> None:
    for block in read_blocks(page):
        person.do(block)


def test_a_page_that_is_right_is_followed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("first\nold\nlast\n")
    page = (
        "```sh\ncd sub\n```\n\n```sh\ncat file\n```\n\n```text\nfi…t\nlast\n```\n\n"
        "In `file`:\n\n```diff\n first\n-old\n+new\n+er\n last\n```\n\n"
        "`made.yaml`:\n\n```yaml\na: 1\n```\n\n<!-- test: fails -->\n```sh\nexit 3\n```\n"
    )
    follow(page, Reader(tmp_path, os.environ))
    assert (tmp_path / "sub" / "file").read_text() == "first\nnew\ner\nlast\n"
    assert (tmp_path / "sub" / "made.yaml").read_text() == "a: 1\n"
