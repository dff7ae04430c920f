"""The operations of layers, one call each, so that a device's fused kernels have a place to plug in.

Layers call these functions only. Each picks an implementation by where its tensors are: numba kernels on the CPU
(:mod:`mstar.nn.ops.cpu`) if numba is installed and works here, Triton kernels on CUDA (:mod:`mstar.nn.ops.cuda`,
:mod:`mstar.nn.ops.cuda_linear`, :mod:`mstar.nn.ops.cuda_groupnorm`, :mod:`mstar.nn.ops.cuda_sampling`) if Triton is
installed, else plain torch (:mod:`mstar.nn.ops.reference`), which says what each operation means. On CUDA a linear
layer may take in the operations beside it; the layers ask whether it does, and elsewhere it never does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.ops import reference
from mstar.nn.ops.reference import HeadNorms, whole
from mstar.nn.sampling import Changes

__all__ = [
    "HeadNorms",
    "Sample",
    "add_channels",
    "add_layer_norm",
    "add_linear",
    "add_rms_norm",
    "cpu_kernels_fault",
    "cuda_kernels_fault",
    "deterministic_fault",
    "divided_linear",
    "fused_sample",
    "group_norm",
    "linear",
    "norm_gate_up",
    "norm_linear",
    "rotate",
    "rotate_store",
    "rotation",
    "sigmoid_mul",
    "silu_mul",
    "store_rows",
    "whole",
]

log = logging.getLogger(__name__)

Sample = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool, Changes | None], Tensor]
""":func:`mstar.nn.ops.cuda_sampling.sample`."""


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


@cache
def cuda_kernels_fault() -> str | None:
    """Why the Triton kernels cannot be used, or ``None``. They are compiled at their first use, once a machine."""
    try:
        import mstar.nn.ops.cuda
        import mstar.nn.ops.cuda_groupnorm
        import mstar.nn.ops.cuda_invariant
        import mstar.nn.ops.cuda_linear
        import mstar.nn.ops.cuda_sampling  # noqa: F401
    except ImportError as error:
        fault = f"{error.name} cannot be imported: {error}"
        log.warning("CUDA: plain torch operations are used, which are several times slower between products: %s", fault)
        return fault
    return None


@cache
def _on_cuda() -> ModuleType:
    if cuda_kernels_fault() is not None:
        return reference
    from mstar.nn.ops import cuda

    return cuda


def _ops(x: Tensor) -> ModuleType:
    if torch.compiler.is_compiling():
        return reference  # which the compiler fuses; it cannot look into the others
    if x.is_cpu:
        return _on_cpu() if x.dtype is not torch.float16 else reference
    return _on_cuda() if x.is_cuda else reference


def _linear(x: Tensor) -> ModuleType | None:
    """The kernels for linear layers of few rows, if *x* is where they run."""
    if not x.is_cuda or torch.compiler.is_compiling() or cuda_kernels_fault() is not None:
        return None
    from mstar.nn.ops import cuda_linear

    return cuda_linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool = False) -> Tensor:
    """``x @ weight.T + bias`` ``[..., N]`` of *x* ``[..., K]`` and *weight* ``[N, K]``.

    :param deterministic: also of the functions below: a row's numbers do not depend on how many rows there are. On CUDA
        only with weights of :func:`deterministic_fault`; elsewhere the same operation as ever.
    """
    kernels = _linear(x)
    if deterministic and x.is_cuda:
        return _deterministic_linear(kernels, x, weight, bias)
    out: Tensor | None = None if kernels is None else kernels.linear(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def _deterministic_linear(kernels: ModuleType | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 or rows.stride(0) % 8:
        rows = rows.contiguous()
    if not rows.shape[0]:
        return F.linear(x, weight, bias)
    out: Tensor | None = None if kernels is None else kernels.linear(rows, weight, bias, True)
    if out is None:
        raise RuntimeError(f"no deterministic product of {x.dtype} with a {weight.dtype} weight of {weight.shape}")
    return out.view(*x.shape[:-1], weight.shape[0])


def deterministic_fault(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why no deterministic product with *weight* ``[N, K]`` can be had on CUDA, or ``None``."""
    fault = cuda_kernels_fault()
    if fault is not None:
        return fault
    from mstar.nn.ops import cuda_linear

    return cuda_linear.refuses(weight, bias)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool = False) -> bool:
    """Add ``x @ weight.T + bias`` to *residual* ``[M, N]`` in place, if one kernel does it here.

    :returns: whether it did; otherwise nothing was done.
    """
    kernels = _linear(x)
    return kernels is not None and kernels.add_linear(residual, x, weight, bias, deterministic)


def divided_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """``x @ weight.T`` of *x* ``[M, K]`` and *weight* ``[N, K]`` as float32 parts ``[P, M, N]``, each of some of the
    input features: for :func:`add_rms_norm`, which adds them up on its way, or :func:`whole`.

    :returns: ``None`` where that is no faster.
    """
    kernels = _linear(x)
    return None if kernels is None else kernels.divided_linear(x, weight)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, deterministic: bool = False
) -> Tensor | None:
    """``linear(rms_norm(x))`` ``[M, N]`` in one kernel, or ``None`` where there is none for these tensors.

    :param x: ``[M, K]``, not changed. :param norm: the norm's weight ``[K]``, in the dtype of *x* or float32.
    """
    kernels = _linear(x)
    return None if kernels is None else kernels.norm_linear(x, norm, eps, weight, bias, deterministic)


def norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, deterministic: bool = False
) -> Tensor | None:
    """``silu_mul(linear(rms_norm(x)))`` ``[M, N / 2]``, otherwise as :func:`norm_linear`. *weight*: all gates, then all
    ups."""
    kernels = _linear(x)
    return None if kernels is None else kernels.norm_gate_up(x, norm, eps, weight, bias, deterministic)


def fused_sample(device: torch.device) -> Sample | None:
    """Sampling in few kernels, for logits on *device*; ``None`` where :mod:`mstar.nn.sampling` is what there is."""
    if device.type != "cuda" or cuda_kernels_fault() is not None:
        return None
    from mstar.nn.ops import cuda_sampling

    return cuda_sampling.sample


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    """Add *delta* to *residual* ``[N, size]`` in place and return ``residual / sqrt(mean(residual²) + eps) * weight``.

    :param residual: the model's dtype or float32. :param delta: ``[N, size]`` in the model's dtype, what
        :func:`divided_linear` gives, or ``None`` for nothing to add.
    :param dtype: of the result, where *weight* ``[size]`` is float32 and the model is not. Default: that of *weight*.
    :param following: the weight ``[N, size]`` of the product that comes next. With few rows a GPU begins to bring it
        from memory meanwhile; the result is the same.
    :returns: a new tensor, rounded once.
    """
    return _ops(weight).add_rms_norm(residual, delta, weight, eps, dtype, following)  # type: ignore[no-any-return]


def add_layer_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Add *delta* to *residual* ``[N, size]`` in place and return its layer norm (Ba et al. 2016): each row less its
    mean, over ``sqrt(variance + eps)``, times *weight* plus *bias*.

    :param delta: as :func:`add_rms_norm`'s. All else is of the model's dtype.
    :returns: a new tensor of that dtype, rounded once.
    """
    added = None if delta is None else whole(delta, residual)
    return _ops(weight).add_layer_norm(residual, added, weight, bias, eps)  # type: ignore[no-any-return]


def silu_mul(gate_up: Tensor, following: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` ``[N, size]`` of *gate_up* ``[N, 2 * size]``, gate first. *following*: as
    :func:`add_rms_norm`'s."""
    return _ops(gate_up).silu_mul(gate_up, following)  # type: ignore[no-any-return]


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` ``[N, size]`` of two of that size and one dtype; rows of *gate* may have any stride."""
    return _ops(x).sigmoid_mul(x, gate)  # type: ignore[no-any-return]


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool = False, added: Tensor | None = None
) -> Tensor:
    """*x* ``[rows, C, ...]`` normalised over the points and channels of each of *groups* (Wu and He 2018), times
    *weight* ``[C]``, plus *bias* ``[C]``; with *silu* also activated.

    :param added: ``[C]``, added to *x* first: the bias of a convolution that was computed without.
    :returns: a new tensor with the strides of *x*. On CUDA with channels last (in memory ``[rows, ..., C]``) it is
        rounded once; elsewhere the norm is rounded before it is activated.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or cuda_kernels_fault() is not None:
        return reference.group_norm(x, groups, weight, bias, eps, silu, added)
    from mstar.nn.ops import cuda_groupnorm

    return cuda_groupnorm.group_norm(x, groups, weight, bias, eps, silu, added)


def add_channels(x: Tensor, y: Tensor, added: Tensor) -> Tensor:
    """``x + y``, plus *added* ``[C]``: of two *x* and *y* ``[rows, C, ...]`` of one dtype. On CUDA with channels last
    it is rounded once.

    :returns: a new tensor with the strides of *x*.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or cuda_kernels_fault() is not None:
        return reference.add_channels(x, y, added)
    from mstar.nn.ops import cuda_groupnorm

    return cuda_groupnorm.add_channels(x, y, added)


def rotate(heads: Tensor, turning: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first *turning* heads of *heads* ``[N, H, head_dim]``; see :class:`mstar.nn.rotary.Rotation`.

    :returns: ``[N, turning, head_dim]``, which may be a view of *heads*, overwritten.
    """
    return _ops(heads).rotate(heads, turning, cos, sin)  # type: ignore[no-any-return]


def rotation(
    positions: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """*scale* × cosine and sine of ``positions × inverse``, computed in float32, as *dtype* ``[N, 1, size]``.

    :param positions: integers ``[N]``, or with *axes* ``[A, N]``. :param inverse: float32 ``[size]``, radians per
        position. :param axes: int64 ``[size]``, below A: whose position turns each element (multimodal rope).
    """
    return _ops(inverse).rotation(positions, inverse, scale, dtype, axes)  # type: ignore[no-any-return]


def rotate_store(
    heads: Tensor,
    q_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    keys: Tensor | None,
    values: Tensor | None,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys, and put keys and values where attention reads them.

    :param heads: ``[N, q_heads + 2 * kv_heads, head_dim]``: queries, keys, values; may be overwritten.
    :param norms: applied before the rotation. :param cos: and *sin*: see :class:`mstar.nn.rotary.Rotation`.
    :param keys: and *values*, *places*: as in :func:`store_rows`; without *places* nothing is stored.
    :returns: q, k and v ``[N, heads of each, head_dim]``, rotated where they are to be; they may be views of *heads*.
    """
    return _ops(heads).rotate_store(heads, q_heads, cos, sin, norms, keys, values, places)  # type: ignore[no-any-return]


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the rows of *k*, *v* ``[N, ...]`` at *places* int64 ``[N]`` of *keys*, *values* ``[tokens, width]``."""
    _ops(keys).store_rows(keys, values, places, k, v)
