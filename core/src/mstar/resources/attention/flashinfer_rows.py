"""What one FlashInfer kernel serves: rows of a step over paged contexts, or segments that attend within themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.resources.attention.base import KVBatch
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, Library, Shape
from mstar.resources.attention.flashinfer_pages import PageList, split_packed
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.triton_decode import RowsPlan

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["LaneRows", "Rows", "Segments", "Way", "fits", "refuse_while_capturing", "usable"]

_SHARED = 3
"""Query heads to a key head from which on tensor cores decode faster than CUDA cores: benchmarks/gpu_attention.py."""
_LONG = 64
"""Mean queries a row from which on fa3, whose tiles are 128 queries of one head, is faster than fa2."""


def _decode_kind(shape: Shape, how: Combination) -> str:
    return "decode" if how.heads // shape.kv_heads < _SHARED else "fa2"


def _prefill_kind(library: Library, pages: PageList, how: Combination) -> str:
    """fa3 where it is the faster one. Its windows and soft caps are kernels of their own, which fa2 has anyway."""
    plain = how.window_left < 0 and how.softcap == 0
    return "fa3" if library.hopper and plain and pages.queries >= _LONG * pages.rows else "fa2"


class Way(NamedTuple):
    """How a layer attends, as :meth:`KVPlan.attend` has it."""

    window: int | None
    causal: bool
    scale: float | None
    softcap: float | None

    def of(self, q: Tensor) -> Combination:
        """What a kernel for queries *q* is made for."""
        left = -1 if self.window is None else self.window - 1
        scale = float(q.shape[2] ** -0.5 if self.scale is None else self.scale)
        return Combination(q.shape[1], left, self.causal, scale, float(self.softcap or 0))


def usable(tensor: Tensor) -> Tensor:
    """*tensor* itself if its heads are contiguous: kernels take any stride of tokens and heads."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def fits(q: Tensor, planned: int) -> None:
    """Kernels trust their plan: with fewer queries they would read what is not there."""
    if q.shape[0] != planned:
        raise ValueError(f"{q.shape[0]} queries in a step that was planned for {planned}")


def refuse_while_capturing(device: torch.device, how: Combination) -> None:
    """:raises RuntimeError: a capture is under way: nothing new can be planned in it."""
    if _capturing(device):
        raise RuntimeError(f"a way to attend ({how}) did not occur before the capture")


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Rows:
    """Consecutive rows of a step that one kernel serves.

    :param first: of their queries among the step's. :param decode: they have one query each.
    """

    def __init__(
        self,
        backend: FlashInferAttention,
        memory: KVMemory,
        page: int,
        pages: PageList,
        packed: Tensor,
        first: int,
        decode: bool,
    ):
        self.backend, self.device = backend, memory.data.device
        self.shape = Shape(memory.kv_heads, memory.head_dim, page, memory.dtype)
        self.pages, self.decode = pages, decode
        self.span = slice(first, first + pages.queries)
        self._views = backend.pages(memory, page)
        self._tables = split_packed(packed, pages.rows)
        self.kernels: dict[Combination, Kernel] = {}

    def kernel(self, how: Combination) -> Kernel:
        """:raises KernelFault: there is none."""
        if self.decode:
            how = how._replace(causal=False)  # a single query sees all of its context
        kernel = self.kernels.get(how)
        if kernel is None:
            kernel = self.kernels[how] = self._find(how)
        return kernel

    def _find(self, how: Combination) -> Kernel:
        backend, device = self.backend, self.device
        kind = _decode_kind(self.shape, how) if self.decode else _prefill_kind(backend.library(device), self.pages, how)
        return backend.kernel(device, kind, self.shape, how)

    def few(self, memory: KVMemory, batch: KVBatch) -> RowsPlan | None:
        """For steps that are *batch*'s rows, which are these: see :mod:`mstar.resources.attention.triton_decode`."""
        _, indptr, indices, last = self._tables
        return self.backend.few.plan(memory, batch, self.shape.page, (indptr, last, indices))

    def attend(self, layer: int, kernel: Kernel, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        if kernel.planned_for is not self:
            kernel.plan(self.pages, self)
        kernel.paged(q, *self._views[layer], self._tables, out, lse)


class LaneRows(Rows):
    """The rows of a lane. Their kernels are the lane's own.

    Rows of several queries use fa2: how many of them have a long context, or one query, differs from step to step, and
    fa3 does not divide contexts.
    """

    def _find(self, how: Combination) -> Kernel:
        refuse_while_capturing(self.device, how)
        kind = _decode_kind(self.shape, how) if self.decode else "fa2"
        return Kernel(self.backend.library(self.device), kind, self.shape, how, (self.pages.rows, self.pages.queries))

    def refill(self, pages: PageList) -> None:
        self.pages = pages
        for kernel in self.kernels.values():
            kernel.plan(pages, self)


class Segments:
    """Packed tokens that attend within consecutive segments."""

    def __init__(self, backend: FlashInferAttention, lengths: Sequence[int] | np.ndarray):
        self._backend = backend
        sizes = np.asarray(lengths, np.int32)
        sizes = sizes[sizes > 0]
        starts = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(sizes, dtype=np.int32, out=starts[1:])
        self._starts = starts
        self._pages = PageList(len(sizes), int(starts[-1]), np.concatenate((starts, starts)), sizes)
        self._indptr: Tensor | None = None

    def kernel(self, q: Tensor, k: Tensor, how: Combination, own: bool = False) -> Kernel:
        """:param own: for these segments alone: what it was planned for stays.
        :raises KernelFault: there is none."""
        library, shape = self._backend.library(q.device), Shape(k.shape[1], k.shape[2], 1, k.dtype)
        kind = _prefill_kind(library, self._pages, how)
        return Kernel(library, kind, shape, how) if own else self._backend.kernel(q.device, kind, shape, how)

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        if self._indptr is None:
            self._indptr = torch.from_numpy(self._starts).to(q.device, non_blocking=True)
        fits(q, self._pages.queries)
        if kernel.planned_for is not self:
            kernel.plan(self._pages, self)
        kernel.ragged(q, usable(k), usable(v), self._indptr, out, lse)
