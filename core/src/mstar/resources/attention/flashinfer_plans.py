"""Planned steps on FlashInfer: which rows go together, when kernels are planned, and what is left to PyTorch."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention.base import KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.flashinfer_kernels import Kernel, KernelFault
from mstar.resources.attention.flashinfer_pages import kernel_page, leading_ones, list_pages, room
from mstar.resources.attention.flashinfer_rows import LaneRows, Rows, Segments, Way, fits, usable
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.triton_decode import RowsPlan
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.resources.attention.flashinfer import FlashInferAttention

__all__ = ["BesidePlan", "LanePlan", "MemoryPlan", "SegmentsPlan", "StepPlan"]


class MemoryPlan(KVPlan):
    """What plans over a memory share.

    :ivar _few: one operation for :meth:`attend_heads`, where the step has it.
    """

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, key: str):
        self._backend, self._memory, self._key = backend, memory, key
        self._few: RowsPlan | None = None

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
        return self._attend(layer, q, k, v, Way(window, causal, scale, softcap))

    @abc.abstractmethod
    def _attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor:
        """:meth:`attend`, with its options in one."""

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


class _PlainPlan(MemoryPlan):
    """A step outside of lanes. What no kernel can say is PyTorch's.

    :ivar _longest: from which width on a window leaves nothing out; ``None``: not known.
    """

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, batch: KVBatch, stage: Stage, key: str):
        super().__init__(backend, memory, key)
        self._batch, self._stage = batch, stage
        self._longest: int | None = None
        self._torch: KVPlan | None = None

    def _rows(self, rows: slice, ends: np.ndarray, first: int, key: str, decode: bool) -> Rows:
        """Those of the step's rows whose contexts have *ends*; *first*: of their queries among the step's."""
        batch = self._batch
        pages = list_pages(batch.lengths[rows], ends[rows], batch.tables[rows], batch.page_size)
        packed, page = self._stage.put(key, pages.packed), kernel_page(batch.page_size)
        return Rows(self._backend, self._memory, page, pages, packed, first, decode)

    def _attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor:
        if way.window is not None and self._longest is not None and way.window >= self._longest:
            way = way._replace(window=None)  # nothing is outside of it
        mixed = self._by_kernels(layer, q, k, v, way)
        if mixed is not None:
            return mixed
        if self._torch is None:
            self._torch = self._backend.torch_plan(self._memory, self._batch, self._stage, self._key)
        return self._torch.attend(layer, q, k, v, **way._asdict())

    @abc.abstractmethod
    def _by_kernels(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor | None:
        """:meth:`_attend`; ``None`` if there are no kernels for it, and nothing was done."""


class StepPlan(_PlainPlan):
    """A step over keys that are in the memory. Kernels are planned at their first use in the step."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, batch: KVBatch, stage: Stage, key: str):
        super().__init__(backend, memory, batch, stage, key)
        self._written = batch.step_kv == "written"
        ends = batch.starts + batch.lengths if self._written else batch.starts
        self._longest = _longest(ends) if self._written else None
        self._longest_step = _longest(batch.lengths)
        decodes = leading_ones(batch.lengths)
        self._parts: list[Rows] = []
        if decodes:
            self._parts.append(self._rows(slice(0, decodes), ends, 0, f"{key}.decode", True))
        if decodes < len(batch.lengths):
            self._parts.append(self._rows(slice(decodes, None), ends, decodes, f"{key}.prefill", False))
        self._few = self._parts[0].few(memory, batch) if decodes == len(batch.lengths) > 0 else None

    def _by_kernels(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor | None:
        if not self._expressible(q, way.window, way.causal):
            return None
        try:
            how = way._replace(causal=way.causal and self._written).of(q)
            kernels = [part.kernel(how) for part in self._parts]
        except KernelFault:  # said when it was found
            return None
        return self._run(layer, usable(q), kernels)

    def _expressible(self, q: Tensor, window: int | None, causal: bool) -> bool:
        if q.dtype is not self._memory.dtype:
            return False
        if window is None:
            return True
        # The tokens of a step that is not causal see all of the step, whatever the window.
        return self._written and not self._batch.sink and (causal or self._longest_step <= window)

    def _run(self, layer: int, q: Tensor, kernels: list[Kernel]) -> Tensor:
        fits(q, self._parts[-1].span.stop if self._parts else 0)
        out = q.new_empty(q.shape)
        if len(kernels) == 1:
            self._parts[0].attend(layer, kernels[0], q, out)
            return out
        for part, kernel in zip(self._parts, kernels, strict=True):
            part.attend(layer, kernel, q[part.span], out[part.span])
        return out


class LanePlan(MemoryPlan):
    """Steps on one lane: one query a row, or always as many in all. All kernels that the lane has used are planned for
    each step."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, key: str):
        super().__init__(backend, memory, key)
        self._rows: LaneRows | None = None
        self._written, self._windows = False, False
        self._batch: KVBatch | None = None  # of the last plan
        self._room = 0

    def refill(self, batch: KVBatch, stage: Stage) -> None:
        """Plan the lane's next step; nothing is to be planned if *batch* is the very one of the step before. What it
        reads is on the device once *stage* has been sent."""
        if batch is self._batch and self._rows is not None:
            stage.put(f"{self._key}.pages", self._rows.pages.packed, room=self._room)
            return
        self._batch = None  # unless this one can be planned
        rows, size, written = len(batch.lengths), batch.page_size, batch.step_kv == "written"
        lane = stage.lane
        assert lane is not None
        decode = lane.tokens == lane.rows
        if (batch.lengths != 1).any() if decode else batch.lengths.sum() != lane.tokens:
            wanted = "one query a row" if decode else f"{lane.tokens} queries"
            raise ValueError(f"a captured step of {self._key!r} has {wanted}, not {batch.lengths.tolist()}")
        ends = batch.starts + batch.lengths if written else batch.starts
        pages = list_pages(batch.lengths, ends, batch.tables, size)
        self._room = room(rows, batch.most_pages or batch.tables.shape[1], size)
        packed = stage.put(f"{self._key}.pages", pages.packed, room=self._room)
        self._written, self._windows = written, written and not batch.sink
        if self._rows is None:
            self._rows = LaneRows(self._backend, self._memory, kernel_page(size), pages, packed, 0, decode)
            self._few = self._rows.few(self._memory, batch) if decode else None
        else:
            self._rows.refill(pages)
        self._batch = batch

    def _attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor:
        assert self._rows is not None
        windows = self._windows and (way.causal or self._rows.decode)
        if q.dtype is not self._memory.dtype or (way.window is not None and not windows):
            raise ValueError(f"{self._key!r} attends in a way that a captured step has no kernel for")
        fits(q, self._rows.pages.queries)
        q = usable(q)
        out = q.new_empty(q.shape)
        how = way._replace(causal=way.causal and self._written).of(q)
        self._rows.attend(layer, self._rows.kernel(how), q, out)
        return out


class BesidePlan(_PlainPlan):
    """A step that is kept nowhere: attention over the memory and within the step, merged."""

    def __init__(self, backend: FlashInferAttention, memory: KVMemory, batch: KVBatch, stage: Stage, key: str):
        super().__init__(backend, memory, batch, stage, key)
        self._longest = _longest(batch.starts + batch.lengths)
        self._own = Segments(backend, batch.lengths)
        self._context: Rows | None = None
        if batch.starts.any():
            self._context = self._rows(slice(None), batch.starts, 0, f"{key}.context", False)

    def _by_kernels(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, way: Way) -> Tensor | None:
        assert k is not None
        assert v is not None
        if way.window is not None or q.dtype is not self._memory.dtype or k.dtype is not q.dtype:
            return None
        how = way.of(q)
        try:
            own = self._own.kernel(q, k, how)
            context = None if self._context is None else self._context.kernel(how._replace(causal=False))
        except KernelFault:  # said when it was found
            return None
        return self._run(layer, usable(q), k, v, own, context)

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
        self._segments = Segments(backend, lengths)
        self._torch: RaggedPlan | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        if not q.shape[0]:
            return torch.empty_like(q)
        try:
            kernel = self._segments.kernel(q, k, Way(None, causal, scale, None).of(q))
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
