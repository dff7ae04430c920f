"""The codec's Triton kernels, on a machine without a GPU: run by Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


def test_the_kernels_in_tritons_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is settled when they are defined."""
    cases = Path(__file__).parent / "codec_cuda_cases.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mstar_tts.codec_cuda import _snake

    pointers = dict.fromkeys(("x", "frequency", "gain", "out"), "*fp32")
    signature = {name: pointers.get(name, "i32") for name in _snake.arg_names} | {"block": "constexpr"}
    source = ASTSource(fn=_snake, signature=signature, constexprs={"block": 1024})
    ptx = str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}).asm["ptx"])
    assert "st.global" in ptx
    assert "sin.approx" not in ptx  # wrong beyond a few turns
