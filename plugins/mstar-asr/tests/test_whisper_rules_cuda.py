"""The rules' Triton kernels, on a machine without a GPU: run by Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mstar.testing.kernels import compile_kernel, interpret

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


def test_the_kernels_in_tritons_interpreter() -> None:
    interpret(Path(__file__).with_name("rules_cuda_cases.py"))


def test_the_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar_asr.whisper.rules_cuda import _following, _note

    def compiled(kernel: Any, types: dict[str, str], **constants: Any) -> str:
        ptx = compile_kernel(kernel, types, {**constants, "early": True}, launch_pdl=True)
        before, wait, after = ptx.partition("griddepcontrol.wait")
        assert wait, "the kernel does not wait for those before it"
        assert "st.global" not in before
        assert "ld.global" not in before
        assert "st.global" in after
        return after

    numbers = dict.fromkeys(("suppressed", "begin", "eot", "no_timestamps"), "i32")
    whole = compiled(
        _following,
        {"logits": "*fp32", "facts": "*i64", "never": "*i64", **numbers},
        **{"stride": 51866, "width": 5, "vocab": 51866, "block": 4096, "block_never": 128},
    )
    assert "bar.sync" in whole.partition("st.global")[2]  # what is suppressed is there before logits are read again
    pointers = ("ids", "facts", "said", "facts_pool", "source", "target", "facts_target")
    sizes = {"width": 5, "facts_stride": 5, "length": 448, "said_stride": 448, "block": 512}
    compiled(_note, {**dict.fromkeys(pointers, "*i64"), "begin": "i32"}, **sizes)
