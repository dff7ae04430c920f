"""The cases that kernels are held against, without a GPU: in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("cuda_*_cases.py"))

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", CASES, ids=[path.stem for path in CASES])
def test_kernels_in_tritons_interpreter(file: Path) -> None:
    """In a process of its own: whether kernels are interpreted is settled when they are defined."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
