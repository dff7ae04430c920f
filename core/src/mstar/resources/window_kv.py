"""Bounded, rolling keys and values: the ``window_kv`` resource."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, pick_backend
from mstar.resources.attention.memory import dtype_named
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row, State
from mstar.resources.paged_kv import PagedView, flat_positions
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.spec import resources as specs
from mstar.spec.errors import MstarError, SetupError
from mstar.spec.request import EngineRequest

__all__ = ["WindowKV"]

_Ints = npt.NDArray[np.int64]


class WindowKV(SlotResource):
    """A ring per context that holds its first ``sink`` and last ``window`` tokens. Its view is a
    :class:`~mstar.resources.paged_kv.PagedView`; positions go on counting past the window.

    A query at position *p* sees positions ``> p - window``, the sinks, and with ``causal=False`` its whole step. The
    ring has ``max_step`` places more than the window, so that a step never overwrites what a repetition of it, or the
    step that follows when it is retracted, would read.

    Where a ring's tokens lie is in tables and places that are made anew for each step; one slot more than owners have
    is for the rows that pad a captured step.
    """

    kind = "window_kv"
    moves = True
    looks_at = ()
    speculates = True
    spec: specs.WindowKV

    def __init__(self, name: str, spec: specs.WindowKV, context: ResourceContext):
        if spec.window < 1 or spec.max_step < 1 or spec.sink < 0:
            raise SetupError(f"resource {name!r}: window and max_step must be at least 1 and sink at least 0")
        slots = slot_count(name, spec.slots, context)
        super().__init__(name, spec, context, slots=slots)
        dtype = dtype_named(spec.dtype, context.dtype)
        need = AttentionNeed(
            mode="kv",
            device=torch.device(context.device),
            dtype=context.dtype,
            query_heads=spec.query_heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            windows=frozenset({spec.window}),
            kv_dtype=dtype,
        )
        self.backend = pick_backend(context.attention_backends, need, spec.backend)
        self._ring = spec.window + spec.max_step
        self._slot_tokens = spec.sink + self._ring
        slot_bytes = self._slot_tokens * KVMemory.token_bytes(spec.layers, spec.kv_heads, spec.head_dim, dtype)
        what = f"{slots} slots of sink + window + max_step = {self._slot_tokens} tokens"
        check_budget(name, what, slots, slot_bytes, context, spare=1)
        self.memory = KVMemory(
            spec.layers, (slots + 1) * self._slot_tokens, spec.kv_heads, spec.head_dim, dtype, context.device
        )
        self._padding = slots
        self._lengths: dict[Owner, int] = {}
        self._windows = (spec.window,) * spec.layers
        self.capturable, self.capturable_chunks = self.backend.capturable, self.backend.capturable_chunks

    def open(self, owner: Owner, request: EngineRequest) -> None:
        super().open(owner, request)
        self._lengths.setdefault(owner, 0)

    def close(self, owner: Owner) -> None:
        super().close(owner)
        self._lengths.pop(owner, None)

    def export(self, owner: Owner) -> State:
        """``kv``: ``[layers, 2, places, kv_heads, head_dim]``, the ring as far as it was ever filled."""
        return State({"length": self._lengths[owner]}, {"kv": self._filled(owner).clone()})

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        self._lengths[owner] = int(state.facts["length"])
        self._filled(owner).copy_(state.tensors["kv"])

    def _filled(self, owner: Owner) -> Tensor:
        first = self._slots[owner] * self._slot_tokens
        return self.memory.data[:, :, first : first + min(self._lengths[owner], self._slot_tokens)]

    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        return () if self.capturable and (not frozen or self.backend.capturable_beside) else None

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> PagedView:
        spec, stage = self.spec, self.context.stage
        real = np.fromiter((row.length for row in rows), np.int64, len(rows))
        if not frozen and (real > spec.max_step).any():
            raise MstarError(
                f"a step of {int(real.max())} tokens is longer than max_step={spec.max_step} of resource "
                f"{self.name!r}; raise max_step in its declaration or under resources in the deployment file"
            )
        lengths = stage.lengths(real)
        starts, base = np.zeros_like(lengths), np.full_like(lengths, self._padding * self._slot_tokens)
        starts[: len(rows)] = [self._lengths[row.owner] for row in rows]
        base[: len(rows)] = self._slots.of(rows) * self._slot_tokens
        row_of, positions = flat_positions(starts, lengths)
        kept, gaps, table = self._tables(starts, starts + (0 if frozen else lengths), base)
        single = bool((lengths == 1).all())
        most = self._slot_tokens
        if stage.lane is not None:  # only padding can be longer than a ring; it is there again and again
            most = max(most, stage.lane.tokens)
        batch = KVBatch(lengths, kept, table, 1, "beside" if frozen else "written", spec.sink, gaps, most_pages=most)
        plan = self.backend.plan_kv(self.memory, batch, stage, self.name)
        places = None if frozen else stage.put(f"{self.name}.places", base[row_of] + self._place(positions))
        # A row's table lists what its first query sees, so that a single query needs no window.
        windows = () if single else self._windows
        where = stage.put(f"{self.name}.positions", positions)
        view: PagedView = stage.keep(f"{self.name}.view", lambda: PagedView(self.memory, plan, windows, where, places))
        return view

    def _place(self, positions: _Ints) -> _Ints:
        """Where in a slot each position is kept."""
        sink = self.spec.sink
        return np.where(positions < sink, positions, sink + (positions - sink) % self._ring)

    def _tables(self, starts: _Ints, ends: _Ints, base: _Ints) -> tuple[_Ints, _Ints, npt.NDArray[np.int32]]:
        """Per row: tokens that are still seen before the step, tokens forgotten after the sinks, and the places of all
        tokens up to *ends* that are not forgotten."""
        sink, window = self.spec.sink, self.spec.window
        gaps = np.maximum(0, starts - window + 1 - sink)
        columns = np.arange(int((ends - gaps).max()) if len(ends) else 0)
        positions = columns + np.where(columns >= sink, gaps[:, None], 0)
        return starts - gaps, gaps, (base[:, None] + self._place(positions)).astype(np.int32)

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        if not frozen:
            for row in rows:
                self._lengths[row.owner] += row.length

    def retract(self, row: Row) -> None:
        self._lengths[row.owner] -= row.length

    def device_bytes(self) -> int:
        return self.memory.data.nbytes

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        if not set(self._lengths) <= set(owners):
            raise IntegrityError(f"{self.name!r} remembers owners that are closed")
