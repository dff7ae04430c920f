"""Segments, windows and frozen steps in captured graphs on FlashInfer: plans that stay, planned again for each step.

What a graph reads lies in tensors of the stage and in workspaces of the lane's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention.base import KVBatch, RaggedPlan
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, Shape
from mstar.resources.attention.flashinfer_pages import PageList, kernel_page, list_pages, room
from mstar.resources.attention.flashinfer_plans import MemoryPlan
from mstar.resources.attention.flashinfer_rows import LaneRows, Segments, Way, fits, refuse_while_capturing, usable
from mstar.resources.attention.memory import KVMemory
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["LaneBeside", "LaneSegments", "Windows"]


class LaneSegments(RaggedPlan):
    """Attention within the rows of a lane, or within segments, as many in each step."""

    def __init__(self, backend: FlashInferAttention, key: str):
        self._backend, self._key = backend, key
        self._kernels: dict[tuple[Shape, Combination], Kernel] = {}

    def refill(self, lengths: npt.NDArray[np.int64], stage: Stage) -> None:
        """Plan the lane's next step, of segments of *lengths* that add up to the lane's tokens."""
        lane = stage.lane
        assert lane is not None
        if lengths.sum() != lane.tokens:
            raise ValueError(f"a captured step of {self._key!r} has {lane.tokens} items, not {lengths.tolist()}")
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        packed = np.concatenate((starts, starts))
        self._pages = PageList(len(lengths), lane.tokens, packed, lengths.astype(np.int32))
        self._starts = stage.put(f"{self._key}.segments", starts)
        for kernel in self._kernels.values():
            kernel.plan(self._pages, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return self.attend_lse(q, k, v, Way(None, causal, scale, None).of(q))

    def attend_lse(self, q: Tensor, k: Tensor, v: Tensor, how: Combination, lse: Tensor | None = None) -> Tensor:
        """*lse* float32 ``[N, heads]`` is filled with the logarithms to base 2 of the sums that were divided by."""
        if k.dtype is not q.dtype:
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        fits(q, self._pages.queries)
        q = usable(q)
        out = q.new_empty(q.shape)
        kernel = self._kernel(q.device, Shape(k.shape[1], k.shape[2], 1, k.dtype), how)
        kernel.ragged(q, usable(k), usable(v), self._starts, out, lse)
        return out

    def _kernel(self, device: torch.device, shape: Shape, how: Combination) -> Kernel:
        kernel = self._kernels.get((shape, how))
        if kernel is None:
            refuse_while_capturing(device, how)
            lane = (self._pages.rows, self._pages.queries)
            kernel = self._kernels[shape, how] = Kernel(self._backend.library(device), "fa2", shape, how, lane)
            kernel.plan(self._pages, self)
        return kernel


class Windows(RaggedPlan):
    """Attention within windows of one length, planned once: on any lane, in each step the same."""

    def __init__(self, backend: FlashInferAttention, windows: int, length: int):
        self._segments = Segments(backend, np.full(windows, length))
        self._kernels: dict[tuple[torch.dtype, int, Combination], Kernel] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        how = Way(None, causal, scale, None).of(q)
        key = (k.dtype, k.shape[1], how)
        kernel = self._kernels.get(key)
        if kernel is None:
            refuse_while_capturing(q.device, how)
            kernel = self._kernels[key] = self._segments.kernel(q, k, how, own=True)
        q = usable(q)
        out = q.new_empty(q.shape)
        self._segments.attend(kernel, q, k, v, out)
        return out


class LaneBeside(MemoryPlan):
    """Frozen steps on one lane: attention over the memory and within the step, merged."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, key: str):
        super().__init__(backend, memory, key)
        self._own = LaneSegments(backend, f"{key}.own")
        self._context: LaneRows | None = None

    def refill(self, batch: KVBatch, stage: Stage) -> None:
        """Plan the lane's next step."""
        self._own.refill(batch.lengths, stage)
        pages = list_pages(batch.lengths, batch.starts, batch.tables, batch.page_size)
        most = room(len(batch.lengths), batch.most_pages or batch.tables.shape[1], batch.page_size)
        packed = stage.put(f"{self._key}.context", pages.packed, room=most)
        if self._context is None:
            page = kernel_page(batch.page_size)
            self._context = LaneRows(self._backend, self._memory, page, pages, packed, 0, False)
        else:
            self._context.refill(pages)

    def _attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor:
        assert k is not None
        assert v is not None
        assert self._context is not None
        if q.dtype is not self._memory.dtype or way.window is not None:
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        how = way.of(q)
        q = usable(q)
        lse, seen = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
        own = self._own.attend_lse(q, k, v, how, lse)
        before = q.new_empty(q.shape)
        self._context.attend(layer, self._context.kernel(how._replace(causal=False)), q, before, seen)
        merged: Tensor = self._backend.library(q.device).merge(before, seen, own, lse)[0]
        return merged
