"""What numba kernels for the CPU are made of: raw tensors as arguments, bfloat16, an exponential, torch's own threads.

A kernel is a C function of one pointer, to a block of 64-bit integers: addresses, sizes and strides. Calling one costs
about a microsecond, where a torch operator or numba's own call with arrays costs several; a decode step makes hundreds.
Several threads may run one kernel on one block: each claims the next few work items until none are left, so that a
thread that is late delays nobody.

Threads are torch's. A second pool would compete with torch's, whose threads keep spinning for a while after each
parallel region, for the same cores.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic, overload

__all__ = [
    "Kernel",
    "claim",
    "double_at",
    "exp",
    "float_bits",
    "function",
    "kernel",
    "narrow",
    "prefetch",
    "view",
    "widen",
]

log = logging.getLogger(__name__)

FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums in any order and fused multiply-add, so that loops become vectors. NaN and infinity keep their meaning."""

function = njit(fastmath=FASTMATH, error_model="numpy")
"""Decorator of what kernels call. Division by zero gives infinity: raising would keep loops from becoming vectors."""

_Parallel = Callable[[Any, Any, int, int], None]


# --- inside kernels ---------------------------------------------------------------------------------------------------
@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _fetch_add(typing_context: Any, address: Any, count: Any) -> Any:
    """Atomically add *count* to the int64 at *address*; returns what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", target, arguments[1], "monotonic")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (pointer, number, number, number))
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # A read, of data, to be kept in all levels of cache.
        builder.call(fetch, (builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit(inline="always")
def prefetch(address, count):  # type: ignore[no-untyped-def]
    """Have *count* bytes from *address* on brought into the cache while something else is computed."""
    for line in range(0, count, 64):
        _prefetch(address + line)


@njit(inline="always")
def view(address, count, dtype):  # type: ignore[no-untyped-def]
    """The *count* elements of *dtype* at *address*."""
    return carray(_pointer(address), (count,), dtype)


@njit(inline="always")
def claim(block, count):  # type: ignore[no-untyped-def]
    """First of the next *count* work items of this *block* (its address)."""
    return _fetch_add(block, count)


@njit(inline="always")
def double_at(block, index):  # type: ignore[no-untyped-def]
    """Argument *index* of *block*, packed by :func:`float_bits`."""
    return np.float32(view(block, index + 1, np.float64)[index])


def widen(x):  # type: ignore[no-untyped-def]
    """A stored element as float32. Elements of type uint16 are bfloat16."""
    raise NotImplementedError("inside kernels only")


def narrow(x, like):  # type: ignore[no-untyped-def]
    """float32 as an element of the type of *like*, rounded to nearest even."""
    raise NotImplementedError("inside kernels only")


@overload(widen, inline="always")
def _widen(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


@overload(narrow, inline="always")
def _narrow(x, like):  # type: ignore[no-untyped-def]
    if like != types.uint16:
        return lambda x, like: x

    def rounded(x, like):  # type: ignore[no-untyped-def]
        bits = np.float32(x).view(np.uint32)
        even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        quiet = np.uint16(0x7FC0)  # rounding could carry a NaN into the sign
        return np.uint16(nearest) * np.uint16(x == x) + quiet * np.uint16(x != x)

    return rounded


@function
def exp(x):  # type: ignore[no-untyped-def]
    """e to the power of float32 *x* ≤ 0, within two units in the last place; below -87 it stays at exp(-87).

    Written out, because a call of the C library's would keep the loop around it from becoming vectors. Cody-Waite
    reduction to ±ln(2)/2 and the Taylor polynomial of degree 7, whose remainder there is below float32's precision.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))  # truncation rounds to nearest: x is negative
    f = np.float32(n)
    r = x - f * np.float32(0.693359375) + f * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


# --- outside ----------------------------------------------------------------------------------------------------------
class Kernel:
    """A compiled kernel. ``kernel(parallel, *arguments)``; arguments are integers, see :func:`float_bits` for others.

    :param parallel: run it on as many threads as torch uses. For work of some ten microseconds and more; the
        interpreter's lock is released meanwhile.
    """

    def __init__(self, compiled: Any, arguments: int):
        self._keep = compiled  # owns the machine code
        self._block = ctypes.c_int64 * (arguments + 1)
        self._address = ctypes.c_void_p(compiled.address)
        self._call = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
        self._team = _team()

    def __call__(self, parallel: bool, *arguments: int) -> None:
        block = self._block(0, *arguments)
        if parallel and self._team is not None and (threads := torch.get_num_threads()) > 1:
            self._team(self._address, block, threads, 0)
        else:
            self._call(block)


def kernel(arguments: int) -> Callable[[Callable[[Any], None]], Kernel]:
    """Compile ``f(block)``, *block* being the block's address as an integer: item 0 is what :func:`claim` counts, then
    come *arguments*. Compiled once per machine; numba keeps the code beside the module or in the user's cache."""

    def decorate(body: Callable[[Any], None]) -> Kernel:
        compiled = cfunc(types.void(types.int64), cache=True, fastmath=FASTMATH, error_model="numpy")(body)
        return Kernel(compiled, arguments)

    return decorate


@cache
def float_bits(x: float) -> int:
    """*x* as float64 in the bits of an integer, for :func:`double_at`."""
    bits: int = struct.unpack("q", struct.pack("d", x))[0]
    return bits


@cache
def _team() -> _Parallel | None:
    """``GOMP_parallel(function, data, threads, flags)`` of the OpenMP library that torch has loaded, or ``None``."""
    folder = Path(torch.__file__).parent
    for place in (folder / "lib", folder.parent / "torch.libs"):
        for path in sorted([*place.glob("libgomp*.so*"), *place.glob("libiomp5*.so*")]):
            try:
                parallel = ctypes.CDLL(str(path), _LOADED).GOMP_parallel
            except (OSError, AttributeError):  # not the one that is loaded
                continue
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            return parallel
    log.info("no OpenMP library of torch's was found; CPU kernels run on one thread")
    return None


_LOADED = 0x4 | 0x1  # RTLD_NOLOAD | RTLD_LAZY: only a library that is there already
