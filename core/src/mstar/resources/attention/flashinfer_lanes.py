"""Steps of captured graphs on FlashInfer: plans that stay, whose kernels are planned again for each step.

What a graph reads lies in tensors of the stage and in workspaces of the lane's kernels. All rows of several queries use
fa2: how many of them have a long context, or one query, differs from step to step, and fa3 does not divide contexts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention.base import KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, Shape
from mstar.resources.attention.flashinfer_pages import PageList, kernel_page, list_pages, room
from mstar.resources.attention.flashinfer_plans import Rows, attention_of, check_queries, decode_kind, usable
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.triton_decode import RowsPlan
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["LaneBeside", "LanePlan", "LaneSegments"]


class _LaneRows(Rows):
    """The rows of a lane. Their kernels are the lane's own.

    Rows of several queries use fa2: how many of them have a long context, or one query, differs from step to step, and
    fa3 does not divide contexts.
    """

    def _find(self, how: Combination) -> Kernel:
        _refuse_while_capturing(self.device, how)
        kind = decode_kind(self.shape, how) if self.decode else "fa2"
        return Kernel(self.backend.library(self.device), kind, self.shape, how, (self.pages.rows, self.pages.queries))

    def refill(self, pages: PageList) -> None:
        self.pages = pages
        for kernel in self.kernels.values():
            kernel.plan(pages, self)


class LanePlan(KVPlan):
    """Steps on one lane: one query a row, or always as many in all. All kernels that the lane has used are planned for
    each step."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, key: str):
        self._backend, self._memory, self._key = backend, memory, key
        self._rows: _LaneRows | None = None
        self._few: RowsPlan | None = None
        self._written, self._windows = False, False

    def refill(self, batch: KVBatch, stage: Stage) -> None:
        """Plan the lane's next step. What it reads is on the device once *stage* has been sent."""
        rows, size, written = len(batch.lengths), batch.page_size, batch.step_kv == "written"
        lane = stage.lane
        assert lane is not None
        decode = lane.tokens == lane.rows
        if (batch.lengths != 1).any() if decode else batch.lengths.sum() != lane.tokens:
            wanted = "one query a row" if decode else f"{lane.tokens} queries"
            raise ValueError(f"a captured step of {self._key!r} has {wanted}, not {batch.lengths.tolist()}")
        ends = batch.starts + batch.lengths if written else batch.starts
        pages = list_pages(batch.lengths, ends, batch.tables, size)
        most = room(rows, batch.most_pages or batch.tables.shape[1], size)
        packed = stage.put(f"{self._key}.pages", pages.packed, room=most)
        self._written, self._windows = written, written and not batch.sink
        if self._rows is None:
            self._rows = _LaneRows(self._backend, self._memory, kernel_page(size), pages, packed, 0, decode)
            self._few = self._rows.few(self._memory, batch) if decode else None
        else:
            self._rows.refill(pages)

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
        assert self._rows is not None
        windows = self._windows and (causal or self._rows.decode)
        if q.dtype is not self._memory.dtype or (window is not None and not windows):
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        check_queries(q, self._rows.pages.queries)
        q = usable(q)
        out = q.new_empty(q.shape)
        how = attention_of(q, window, causal and self._written, scale, softcap)
        self._rows.attend(layer, self._rows.kernel(how), q, out)
        return out

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


class LaneSegments(RaggedPlan):
    """Attention within the rows of a lane."""

    def __init__(self, backend: FlashInferAttention, key: str):
        self._backend, self._key = backend, key
        self._kernels: dict[tuple[Shape, Combination], Kernel] = {}

    def refill(self, lengths: npt.NDArray[np.int64], stage: Stage) -> None:
        """Plan the lane's next step, of rows of *lengths* that add up to the lane's tokens."""
        lane = stage.lane
        assert lane is not None
        if len(lengths) != lane.rows or lengths.sum() != lane.tokens:
            raise ValueError(f"a captured step of {self._key!r} has {lane.tokens} items, not {lengths.tolist()}")
        starts = np.zeros(lane.rows + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        packed = np.concatenate((starts, starts))
        self._pages = PageList(lane.rows, lane.tokens, packed, lengths.astype(np.int32))
        self._starts = stage.put(f"{self._key}.segments", starts)
        for kernel in self._kernels.values():
            kernel.plan(self._pages, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        return self.attend_lse(q, k, v, attention_of(q, None, causal, scale, None))

    def attend_lse(self, q: Tensor, k: Tensor, v: Tensor, how: Combination, lse: Tensor | None = None) -> Tensor:
        """*lse* float32 ``[N, heads]`` is filled with the logarithms to base 2 of the sums that were divided by."""
        if k.dtype is not q.dtype:
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        check_queries(q, self._pages.queries)
        q = usable(q)
        out = q.new_empty(q.shape)
        kernel = self._kernel(q.device, Shape(k.shape[1], k.shape[2], 1, k.dtype), how)
        kernel.ragged(q, usable(k), usable(v), self._starts, out, lse)
        return out

    def _kernel(self, device: torch.device, shape: Shape, how: Combination) -> Kernel:
        kernel = self._kernels.get((shape, how))
        if kernel is None:
            _refuse_while_capturing(device, how)
            lane = (self._pages.rows, self._pages.queries)
            kernel = self._kernels[shape, how] = Kernel(self._backend.library(device), "fa2", shape, how, lane)
            kernel.plan(self._pages, self)
        return kernel


class LaneBeside(KVPlan):
    """Frozen steps on one lane: attention over the memory and within the step, merged."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, key: str):
        self._backend, self._memory, self._key = backend, memory, key
        self._own = LaneSegments(backend, f"{key}.own")
        self._context: _LaneRows | None = None

    def refill(self, batch: KVBatch, stage: Stage) -> None:
        """Plan the lane's next step."""
        self._own.refill(batch.lengths, stage)
        pages = list_pages(batch.lengths, batch.starts, batch.tables, batch.page_size)
        most = room(len(batch.lengths), batch.most_pages or batch.tables.shape[1], batch.page_size)
        packed = stage.put(f"{self._key}.context", pages.packed, room=most)
        if self._context is None:
            page = kernel_page(batch.page_size)
            self._context = _LaneRows(self._backend, self._memory, page, pages, packed, 0, False)
        else:
            self._context.refill(pages)

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
        assert self._context is not None
        if q.dtype is not self._memory.dtype or window is not None:
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        how = attention_of(q, None, causal, scale, softcap)
        q = usable(q)
        lse, seen = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
        own = self._own.attend_lse(q, k, v, how, lse)
        before = q.new_empty(q.shape)
        self._context.attend(layer, self._context.kernel(how._replace(causal=False)), q, before, seen)
        merged: Tensor = self._backend.library(q.device).merge(before, seen, own, lse)[0]
        return merged


def _refuse_while_capturing(device: torch.device, how: Combination) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"a way to attend ({how}) did not occur before the capture")
