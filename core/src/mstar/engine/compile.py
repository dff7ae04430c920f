"""``engine.compile``: the layers of a node as compiled regions, each with its shapes' kernels from TorchInductor.

A region is one module (:meth:`mstar.nn.node.Node.regions`). All layers of a kind share what was compiled, because their
weights are arguments; the number of rows is a variable of the compiled code, and so is a layer's number. So a kind of
layer is compiled once for one row (which compilers treat apart) and once for more, whatever steps come.

What a region does with the step's views (attention, recurrent state) is left as it is: the compiled code stops there
and goes on behind it (:func:`opaque`). Within regions the operations of :mod:`mstar.nn.ops` are plain torch ones, which
the compiler fuses.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstar.nn.eager import keep_eager
from mstar.nn.node import Node
from mstar.spec.errors import SetupError

__all__ = ["CompileFault", "compile_regions", "compiler_fault", "opaque"]

_MOST = 64
"""Variants of one layer's code that are compiled, before it is an error: shapes of several nodes, rows, no delta."""
_STEADY = {
    "deterministic": True,  # nothing that is chosen by measuring changes what is computed
    "split_reductions": False,
    "cpp.dynamic_threads": False,
}


_EAGER = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,  # of later torch; what a torch does not know is left out
    "cpp.enable_floating_point_contract_flag": "off",
}


class CompileFault(SetupError):
    """A region could not be compiled; the message names its node and layer."""


def compiler_fault(device: torch.device) -> str | None:
    """``None``, or why nothing can be compiled for *device* on this machine."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            return f"torch.compile needs Triton on a GPU, which cannot be imported: {error}"
        found = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
        return None if found else "torch.compile needs a C compiler (gcc or clang) on this machine; none was found"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler (g++ or clang++) on this machine; none was found"
    return None


def compile_regions(
    nodes: Mapping[str, Node], *, deterministic: bool = False, eager_rounding: bool = False, folder: Path | None = None
) -> list[str]:
    """Have the regions of *nodes* compiled when they first run; gives their names, ``NODE.PATH``.

    :param eager_rounding: values between fused operations are rounded to their dtype, as if they had been stored.
    :param folder: where what was compiled is kept for the next start; ``None``: where torch keeps it.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    keep_eager()
    inductor.compile_threads = 1  # no pool of processes beside the worker
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = _MOST, True
    if _numbered(nodes):  # a layer's number is no reason to compile it apart; where there is none, sizes are constants
        dynamo.allow_unspec_int_on_nn_module = True
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # torch has no other way to be told
    wanted = (_STEADY if deterministic else {}) | (_EAGER if eager_rounding else {})
    known = inductor.get_config_copy()
    options = {name: value for name, value in wanted.items() if name in known} or None
    names = []
    for node_name, node in nodes.items():
        for path, module in node.regions():
            _compile(module, node_name, path, options)
            names.append(f"{node_name}.{path}")
    return names


def _numbered(nodes: Mapping[str, Node]) -> bool:
    """Whether regions of a kind differ in integers that they hold, such as their place among the layers."""
    known: dict[type[nn.Module], list[int]] = {}
    for node in nodes.values():
        for _, region in node.regions():
            held = [value for part in region.modules() for value in vars(part).values() if type(value) is int]
            if known.setdefault(type(region), held) != held:
                return True
    return False


def _compile(module: nn.Module, node: str, path: str, options: dict[str, Any] | None) -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    compiled = torch.compile(module.forward, dynamic=True, options=options)

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise CompileFault(
                f"node {node!r}, layer {path!r} cannot be compiled: {' '.join(lines[:2])}; set engine.compile: false"
            ) from error

    module.forward = forward


# --- views ------------------------------------------------------------------------------------------------------------
def opaque(view: Any) -> Any:
    """*view*, with the same attributes, but its methods are not looked into by the compiler. Plain data stays."""
    if not hasattr(view, "__dict__"):
        return view
    kind: Any = type(view)
    twin: Any = object.__new__(_opaque_kind(kind))
    object.__setattr__(twin, "__dict__", view.__dict__)  # the very same attributes, not copies
    return twin


@cache
def _opaque_kind(kind: Any) -> type:
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__[:-1]):
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                methods[name] = torch.compiler.disable(value)  # type: ignore[no-untyped-call]
    return type(kind.__name__, (kind,), methods)
