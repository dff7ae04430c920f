"""The ``mstar`` process as a shell sees it: damaged installations, closed outputs, Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mstar.cluster.launch import worker_environment

PLUGIN = """
import mstar
from dataclasses import replace
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer
from mstar.spec.processor import TextDelta

class Renderer(MiniRenderer):
    def feed(self, event):
        for delta in super().feed(event):
            yield TextDelta("é→" + delta.text)

class Processor(MiniProcessor):
    def renderer(self, task, prepared):
        return Renderer({"text": "text"}, task)

@mstar.hookimpl
def mstar_models():
    mini = next(mini.spec for mini in MINIATURES if mini.key == "mini_chat")
    return [replace(mini, key="élan", summary="Größe → ✓", processor=__name__ + ":Processor")]
"""


def process(*words: str, path: Path | None = None, **environ: str) -> dict[str, Any]:
    """How :func:`subprocess.run` starts ``mstar WORDS`` with nothing but the core, and *path* before all others."""
    before = [str(path)] if path else []
    paths = os.pathsep.join([*before, *(entry for entry in sys.path if entry)])
    env = {**os.environ, "PYTHONPATH": paths, "MSTAR_PLUGINS": "", **environ}
    return {"args": [sys.executable, "-m", "mstar", *words], "env": env}


# --- what is installed beside M* ---------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [b"[mstar.plugins]\na line without a value\n", b"\xff\xfe[mstar.plugins]\n"])
def test_damaged_entry_points_do_not_end_a_command(tmp_path: Path, entries: bytes) -> None:
    info = tmp_path / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(entries)
    started = process("plugins", path=tmp_path)
    for library in ("PYDANTIC_DISABLE_PLUGINS", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        started["env"].pop(library, None)
    done = subprocess.run(**started, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "damaged-1.0.dist-info, cannot be read: " in done.stdout
    assert "damaged: run `pip install --force-reinstall damaged`" in done.stdout


def test_workers_leave_the_plugins_of_libraries_alone_unless_the_operator_wants_them() -> None:
    environment = worker_environment(None, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"})
    assert environment["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
    assert environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_a_plugin_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    started = process("models", path=tmp_path, MSTAR_EXTRA_PLUGINS="endless")
    done = subprocess.run(**started, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted while plugin 'endless' was imported\n"


# --- encodings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("models",),
        ("models", "--json"),
        ("graph", "élan"),
        ("check", "élan"),
        ("doctor",),
        ("run", "élan", "Hi", "--set", "max_tokens=3"),
        ("run", "élan", "Hi", "--json"),
    ],
)
def test_characters_that_the_terminal_lacks_are_replaced(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "accents.py").write_text(PLUGIN, encoding="utf-8")
    started = process(*words, path=tmp_path, MSTAR_EXTRA_PLUGINS="accents", PYTHONIOENCODING="ascii", LANG="C")
    done = subprocess.run(**started, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    assert (done.stdout + done.stderr).isascii()
    if "--json" in words:
        assert "é" in str(json.loads(done.stdout)), "JSON loses nothing"


# --- outputs that cannot be written --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("plugins",), ("plugins", "--json"), ("--help",)])
def test_a_reader_that_has_left_is_no_fault(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(**process(*words), stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_full_disk_is_told_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(**process("plugins"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "no space is left" in done.stderr
    assert "Traceback" not in done.stderr
