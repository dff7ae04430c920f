"""The reference, ``qwen_tts`` 0.1.1, where it is installed.

It works with one release of transformers, older than the one that other tests want. So it lies in a folder of its own
(``tests/references-qwen-tts.txt``), and what it computes is computed by another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["folder", "run"]

_HERE = "MSTAR_QWEN_TTS_REFERENCE"


def folder() -> Path:
    """Where it is. Skips the test if it is nowhere."""
    place = Path(os.environ.get(_HERE) or Path(sys.prefix) / "references" / "qwen_tts")
    if not (place / "qwen_tts").is_dir():
        pytest.skip(f"the reference is not installed in {place}: tests/references-qwen-tts.txt says how")
    return place


def run(script: Path, *arguments: str | Path) -> None:
    """Run *script*, a Python program that begins by importing :mod:`qwen_tts_bare`, with the reference's packages
    before all others."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder()), str(script.parent)]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    words = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
