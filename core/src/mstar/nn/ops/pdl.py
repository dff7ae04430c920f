"""Programmatic dependent launch (CUDA, compute capability 9.0 and later): a kernel may start while the one before it
still runs, and does there what needs none of its results.

Every kernel that is launched this way calls :func:`begin`, or :func:`wait` and, anywhere, :func:`release`. It
waits before it touches anything that an earlier kernel may write, or writes what an earlier one may read: buffers come
from a caching allocator, which gives them out again. That all of them do so is what makes waiting for the kernel before
enough: it ended only after it had waited for its own. Weights alone may be read earlier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["begin", "enabled", "options", "release", "use", "wait"]

_on = False


def use(on: bool) -> None:
    """Launch the kernels of this package this way from now on, or no longer. Off until this is called; it must not be
    called while a graph is captured or a kernel runs."""
    global _on
    if on and torch.cuda.get_device_capability() < (9, 0):
        raise RuntimeError("programmatic dependent launch needs a GPU of compute capability 9.0 or later")
    _on = on


def enabled() -> bool:
    """What the kernels' constant ``pdl`` is to be."""
    return _on


def options() -> dict[str, Any]:
    """What a launch needs besides."""
    return {"launch_pdl": True} if _on else {}


@triton.jit
def release(pdl: tl.constexpr):
    """Let the next kernel start as soon as every program of this one has come here."""
    if pdl:
        gdc_launch_dependents()


@triton.jit
def wait(pdl: tl.constexpr):
    """Wait until the kernels before have ended and what they wrote can be read."""
    if pdl:
        gdc_wait()


@triton.jit
def begin(pdl: tl.constexpr):
    """Let the next kernel be launched, and wait for those before."""
    release(pdl)
    wait(pdl)
