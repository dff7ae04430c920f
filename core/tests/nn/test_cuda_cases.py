"""The cases that kernels are held against, without a GPU: in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.testing.kernels import interpret

CASES = sorted(Path(__file__).parent.glob("cuda_*_cases.py"))

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", CASES, ids=[path.stem for path in CASES])
def test_kernels_in_tritons_interpreter(file: Path) -> None:
    interpret(file)
