"""Triton kernels on a machine without a GPU: run by Triton's interpreter, and compiled for a GPU that is not there.

The interpreter accepts what the compiler does not, so kernels are held against both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

__all__ = ["compile_kernel", "interpret", "mend_interpreter"]


def interpret(cases: Path) -> None:
    """Run the tests in file *cases* with kernels interpreted; fails with their output. In a process of its own: whether
    kernels are interpreted is settled when they are defined."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, have them do what they do on a GPU: the interpreter of Triton 3.6 takes a loop's
    bounds from arrays of one element in a way that numpy 2.4 refuses, keeps bfloat16 as integers, and in ``tl.dot``
    multiplies those."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    patch, product = interpreter._patch_lang_tensor, InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: bool = False, **options: Any
) -> str:
    """The PTX of *kernel* for an H100 or H200.

    :param types: of its arguments, as Triton spells them (``"*bf16"``, ``"i32"``); *constants*: the values of the
        others. :param aligned: whether pointers are multiples of 16 bytes. :param options: of the compiler
        (``num_warps``, ``launch_pdl``).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = [number for number, kind in enumerate(signature.values()) if kind.startswith("*")] if aligned else []
    attributes = {(number,): [["tt.divisibility", 16]] for number in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attributes)
    options = {"enable_fp_fusion": True, **options}  # the default, which some releases warn of
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
