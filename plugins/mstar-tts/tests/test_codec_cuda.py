"""The codec's Triton kernels, on a machine without a GPU: run by Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.testing.kernels import compile_kernel, interpret

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


def test_the_kernels_in_tritons_interpreter() -> None:
    interpret(Path(__file__).with_name("codec_cuda_cases.py"))


def test_the_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar_tts.codec_cuda import _snake

    pointers = dict.fromkeys(("x", "before", "frequency", "gain", "out"), "*fp32")
    types = {name: pointers.get(name, "i32") for name in _snake.arg_names if name != "block"}
    ptx = compile_kernel(_snake, types, {"block": 1024})
    assert "st.global" in ptx
    assert "sin.approx" not in ptx  # wrong beyond a few turns
