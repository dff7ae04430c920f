"""Planned steps on FlashInfer: which rows go to which kernel, and when kernels are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention.base import KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, KernelFault, Library, Shape
from mstar.resources.attention.flashinfer_pages import (
    PageList,
    kernel_page,
    leading_ones,
    list_pages,
    split_packed,
)
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.triton_decode import RowsPlan
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["BesidePlan", "Rows", "SegmentsPlan", "StepPlan", "attention_of", "check_queries", "decode_kind", "usable"]

_SHARED = 3
"""Query heads to a key head from which on tensor cores decode faster than CUDA cores: benchmarks/gpu_attention.py."""
_LONG = 64
"""Mean queries a row from which on fa3, whose tiles are 128 queries of one head, is faster than fa2."""


def decode_kind(shape: Shape, how: Combination) -> str:
    return "decode" if how.heads // shape.kv_heads < _SHARED else "fa2"


def _prefill_kind(library: Library, pages: PageList, how: Combination) -> str:
    """fa3 where it is the faster one. Its windows and soft caps are kernels of their own, which fa2 has anyway."""
    plain = how.window_left < 0 and how.softcap == 0
    return "fa3" if library.hopper and plain and pages.queries >= _LONG * pages.rows else "fa2"


def attention_of(
    q: Tensor, window: int | None, causal: bool, scale: float | None, softcap: float | None
) -> Combination:
    left = -1 if window is None else window - 1
    return Combination(
        q.shape[1], left, causal, float(q.shape[2] ** -0.5 if scale is None else scale), float(softcap or 0)
    )


def usable(tensor: Tensor) -> Tensor:
    """*tensor* itself if its heads are contiguous: kernels take any stride of tokens and heads."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def check_queries(q: Tensor, planned: int) -> None:
    """Kernels trust their plan: with fewer queries they would read what is not there."""
    if q.shape[0] != planned:
        raise ValueError(f"{q.shape[0]} queries in a step that was planned for {planned}")


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
        kind = decode_kind(self.shape, how) if self.decode else _prefill_kind(backend.library(device), self.pages, how)
        return backend.kernel(device, kind, self.shape, how)

    def few(self, memory: KVMemory, batch: KVBatch) -> RowsPlan | None:
        """For steps that are *batch*'s rows, which are these: see :mod:`mstar.resources.attention.triton_decode`."""
        _, indptr, indices, last = self._tables
        return self.backend.few.plan(memory, batch, self.shape.page, (indptr, last, indices))

    def attend(self, layer: int, kernel: Kernel, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        if kernel.planned_for is not self:
            kernel.plan(self.pages, self)
        kernel.paged(q, *self._views[layer], self._tables, out, lse)


class StepPlan(KVPlan):
    """A step over keys that are in the memory. Kernels are planned at their first use in the step."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, batch: KVBatch, stage: Stage, key: str):
        self._backend, self._memory, self._batch, self._stage, self._key = backend, memory, batch, stage, key
        self._written = batch.step_kv == "written"
        self._ends = batch.starts + batch.lengths if self._written else batch.starts
        self._longest, self._longest_step = _longest(self._ends), _longest(batch.lengths)
        self._torch: KVPlan | None = None
        decodes = leading_ones(batch.lengths)
        self._parts: list[Rows] = []
        if decodes:
            self._parts.append(self._rows(slice(0, decodes), 0, f"{key}.decode", True))
        if decodes < len(batch.lengths):
            self._parts.append(self._rows(slice(decodes, None), decodes, f"{key}.prefill", False))
        self._few = self._parts[0].few(memory, batch) if decodes == len(batch.lengths) > 0 else None

    def _rows(self, rows: slice, first: int, key: str, decode: bool) -> Rows:
        batch = self._batch
        pages = list_pages(batch.lengths[rows], self._ends[rows], batch.tables[rows], batch.page_size)
        packed, page = self._stage.put(key, pages.packed), kernel_page(batch.page_size)
        return Rows(self._backend, self._memory, page, pages, packed, first, decode)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if window is not None and self._written and window >= self._longest:
            window = None  # nothing is outside of it
        if self._expressible(q, window, causal):
            try:
                how = attention_of(q, window, causal and self._written, scale, softcap)
                kernels = [part.kernel(how) for part in self._parts]
            except KernelFault:  # said when it was found
                pass
            else:
                return self._run(layer, usable(q), kernels)
        if self._torch is None:
            self._torch = self._backend.torch_plan(self._memory, self._batch, self._stage, self._key)
        return self._torch.attend(layer, q, k, v, window=window, causal=causal, scale=scale, softcap=softcap)

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        q_heads: int,
        rotation: Rotation,
        norms: HeadNorms | None,
        places: Tensor,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor | None:
        if self._few is None:
            return None
        return self._few.attend_heads(layer, heads, q_heads, rotation, norms, places, window, scale, softcap)

    def _expressible(self, q: Tensor, window: int | None, causal: bool) -> bool:
        if q.dtype is not self._memory.dtype:
            return False
        if window is None:
            return True
        # The tokens of a step that is not causal see all of the step, whatever the window.
        return self._written and not self._batch.sink and (causal or self._longest_step <= window)

    def _run(self, layer: int, q: Tensor, kernels: list[Kernel]) -> Tensor:
        check_queries(q, self._parts[-1].span.stop if self._parts else 0)
        out = q.new_empty(q.shape)
        if len(kernels) == 1:
            self._parts[0].attend(layer, kernels[0], q, out)
            return out
        for part, kernel in zip(self._parts, kernels, strict=True):
            part.attend(layer, kernel, q[part.span], out[part.span])
        return out


class _Segments:
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

    def kernel(self, q: Tensor, k: Tensor, how: Combination) -> Kernel:
        """:raises KernelFault: there is none."""
        kind = _prefill_kind(self._backend.library(q.device), self._pages, how)
        return self._backend.kernel(q.device, kind, Shape(k.shape[1], k.shape[2], 1, k.dtype), how)

    def attend(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        if self._indptr is None:
            self._indptr = torch.from_numpy(self._starts).to(q.device, non_blocking=True)
        check_queries(q, self._pages.queries)
        if kernel.planned_for is not self:
            kernel.plan(self._pages, self)
        kernel.ragged(q, usable(k), usable(v), self._indptr, out, lse)


class BesidePlan(KVPlan):
    """A step that is kept nowhere: attention over the memory and within the step, merged."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, batch: KVBatch, stage: Stage, key: str):
        self._backend, self._memory, self._batch, self._stage, self._key = backend, memory, batch, stage, key
        self._longest = _longest(batch.starts + batch.lengths)
        self._own = _Segments(backend, batch.lengths)
        self._torch: KVPlan | None = None
        self._context: Rows | None = None
        if batch.starts.any():
            pages = list_pages(batch.lengths, batch.starts, batch.tables, batch.page_size)
            packed, page = stage.put(f"{key}.context", pages.packed), kernel_page(batch.page_size)
            self._context = Rows(backend, memory, page, pages, packed, 0, False)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert k is not None
        assert v is not None
        if window is not None and window >= self._longest:
            window = None
        if window is None and q.dtype is self._memory.dtype and k.dtype is q.dtype:
            how = attention_of(q, None, causal, scale, softcap)
            try:
                own = self._own.kernel(q, k, how)
                context = None if self._context is None else self._context.kernel(how._replace(causal=False))
            except KernelFault:  # said when it was found
                pass
            else:
                return self._run(layer, usable(q), k, v, own, context)
        if self._torch is None:
            self._torch = self._backend.torch_plan(self._memory, self._batch, self._stage, self._key)
        return self._torch.attend(layer, q, k, v, window=window, causal=causal, scale=scale, softcap=softcap)

    def _run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, own: Kernel, context: Kernel | None) -> Tensor:
        out = q.new_empty(q.shape)
        if context is None or self._context is None:
            self._own.attend(own, q, k, v, out)
            return out
        lse, seen = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
        self._own.attend(own, q, k, v, out, lse)
        before = q.new_empty(q.shape)
        self._context.attend(layer, context, q, before, seen)
        merged: Tensor = self._backend.library(q.device).merge(before, seen, out, lse)[0]
        return merged


class SegmentsPlan(RaggedPlan):
    """Attention within segments."""

    def __init__(self, backend: FlashInferAttention, lengths: Sequence[int], stage: Stage, key: str):
        self._backend, self._lengths, self._stage, self._key = backend, lengths, stage, key
        self._segments = _Segments(backend, lengths)
        self._torch: RaggedPlan | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        if not q.shape[0]:
            return torch.empty_like(q)
        try:
            kernel = self._segments.kernel(q, k, attention_of(q, None, causal, scale, None))
        except KernelFault:  # said when it was found
            if self._torch is None:
                self._torch = self._backend.torch_ragged(self._lengths, self._stage, self._key)
            return self._torch.attend(q, k, v, causal=causal, scale=scale)
        q = usable(q)
        out = q.new_empty(q.shape)
        self._segments.attend(kernel, q, k, v, out)
        return out


def _longest(lengths: np.ndarray) -> int:
    return int(lengths.max()) if len(lengths) else 0
