"""The tutorial "Write a family", done from its first block to its last, as printed.

What is not as printed, because tests have no network and a busy machine: the virtual environment of the first block is
one that shares this one's libraries; pip takes M* from wheels built here, and is told so by its environment variables
(so every ``pip`` line is the printed one); the server listens on a free port instead of 8000.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .installing import Environment, build_wheel
from .tutorial import Reader, read_blocks

PAGE = Path(__file__).parent.parent / "docs" / "write-a-family.md"
VENV = "python3 -m venv .venv\n. .venv/bin/activate\n"
LIBRARIES = ("pip", "setuptools", "pytest", "httpx", "openai")  # what the page installs beside M*


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A person with M*'s wheels at hand and an empty folder."""
    wheels, desk = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("desk")
    for name in ("mstar-core", "mstar-server"):
        build_wheel(name, wheels)
    environment = Environment(tmp_path_factory.mktemp("environment"), wheels, "mstar-core", *LIBRARIES)
    for name in ("pip", "pytest"):  # libraries are shared, their scripts are not
        script = environment.bin / name
        script.write_text(f'#!/bin/sh\nexec {environment.bin / "python"} -m {name} "$@"\n')
        script.chmod(0o755)
    environ = environment.environ(
        PATH=f"{environment.bin}:/usr/bin:/bin",
        MSTAR_CONFIG=str(desk / "config"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
        PIP_NO_BUILD_ISOLATION="0",  # pip's word for "do not isolate"
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    person = Reader(desk, environ)
    yield person
    person.close()


@pytest.fixture(scope="module")
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_every_block_runs_as_printed(reader: Reader, port: str) -> None:
    blocks = read_blocks(PAGE.read_text(encoding="utf-8"))
    assert blocks[0].text.startswith(VENV)
    blocks[0] = replace(blocks[0], text=blocks[0].text.removeprefix(VENV))
    for block in blocks:
        try:
            reader.do(replace(block, text=block.text.replace("8000", port)))
        except AssertionError as fault:
            fault.add_note(f"{PAGE.name}, line {block.line}:\n{block.text}")
            raise
