"""The operations between matrix products, one call each, so that a device's fused kernels have a place to plug in.

Layers call these functions only. Each picks an implementation by where its tensors are: numba kernels on the CPU
(:mod:`mstar.nn.ops.cpu`) if numba is installed and works here, else plain torch (:mod:`mstar.nn.ops.reference`), which
says what each operation means.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from mstar.nn.ops import reference

__all__ = ["add_rms_norm", "cpu_kernels_fault", "rotate", "silu_mul", "store_rows"]

log = logging.getLogger(__name__)


@cache
def cpu_kernels_fault() -> str | None:
    """Why the numba kernels cannot be used, or ``None``. The first call compiles them, or loads what was compiled."""
    began = time.perf_counter()
    try:
        import mstar.nn.ops.cpu  # noqa: F401
    except ImportError as error:
        fault = f"{error.name} is not installed (pip install 'mstar-core[cpu]')"
    except Exception as error:  # numba cannot compile for this CPU, or finds no folder for what it compiled
        fault = f"numba kernels do not work here: {type(error).__name__}: {error}"
    else:
        log.debug("CPU kernels ready after %.1f s", time.perf_counter() - began)
        return None
    log.warning("CPU: plain torch operations are used, which decode more slowly: %s", fault)
    return fault


@cache
def _on_cpu() -> ModuleType:
    if cpu_kernels_fault() is not None:
        return reference
    from mstar.nn.ops import cpu

    return cpu


def _ops(x: Tensor) -> ModuleType:
    return _on_cpu() if x.is_cpu and x.dtype is not torch.float16 else reference


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add *delta* to *residual* ``[N, size]`` in place and return ``residual / sqrt(mean(residual²) + eps) * weight``.

    :param residual: the model's dtype or float32. :param delta: the model's dtype, or ``None`` for nothing to add.
    :returns: a new tensor in the dtype of *weight* ``[size]``.
    """
    return _ops(weight).add_rms_norm(residual, delta, weight, eps)  # type: ignore[no-any-return]


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` ``[N, size]`` of *gate_up* ``[N, 2 * size]``, gate first."""
    return _ops(gate_up).silu_mul(gate_up)  # type: ignore[no-any-return]


def rotate(heads: Tensor, turning: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first *turning* heads of *heads* ``[N, H, head_dim]``; see :class:`mstar.nn.rotary.Rotation`.

    :returns: ``[N, turning, head_dim]``, which may be a view of *heads*, overwritten.
    """
    return _ops(heads).rotate(heads, turning, cos, sin)  # type: ignore[no-any-return]


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the rows of *k*, *v* ``[N, ...]`` at *places* int64 ``[N]`` of *keys*, *values* ``[tokens, width]``."""
    _ops(keys).store_rows(keys, values, places, k, v)
