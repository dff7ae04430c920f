"""The GPU's kernels on a GPU: the case files that ``test_cuda_cases.py`` runs in Triton's interpreter.

Elsewhere they are skipped. On a machine that has pytest and none of its plugins::

    python -m pytest -c /dev/null --rootdir core/tests/nn -p no:cacheprovider -rs core/tests/nn/test_cuda_device.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("cuda_*_cases.py"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def test_there_are_cases() -> None:
    assert len(CASES) >= 5


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem.removeprefix("cuda_").removesuffix("_cases"))
def test_on_this_machines_gpu(cases: Path) -> None:
    """In a process of its own: what breaks the device breaks that process only. No configuration: it may name plugins
    that are not installed here."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([*command, str(cases)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
