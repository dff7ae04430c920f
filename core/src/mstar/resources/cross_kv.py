"""Keys and values of an encoder's output: the ``cross_kv`` resource."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, KVPlan, pick_backend
from mstar.resources.attention.memory import dtype_named
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row, State
from mstar.resources.paged_kv import flat_positions
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.resources.staging import Lane
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest

__all__ = ["CrossKV", "CrossView"]


class CrossView:
    """What a node uses: :meth:`write` in the entry that has the encoder's output, :meth:`attend` in the one that
    reads."""

    def __init__(self, resource: CrossKV):
        self._resource = resource
        self._plans: dict[tuple[int, ...], KVPlan] = {}

    def fill(self, rows: Sequence[Row], frozen: bool, plan: KVPlan | None) -> None:
        """Plan a step. *plan*: of the rows' own lengths, on a lane, where the node is called for the first step only;
        there it is the same in each step."""
        self._rows, self._frozen, self._lane_plan = rows, frozen, plan
        self._places: Tensor | None = None
        self._written: set[int] = set()
        self._plans.clear()

    def write(self, layer: int, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Store the memory of each row: *k*, *v* packed ``[N, kv_heads, head_dim]``.

        :param lengths: of each row's memory, by default the rows' lengths in this step; the same in all layers.
        :raises IntegrityError: a row's memory was written before: it can be written once.
        :raises RequestError: a memory is longer than ``max_tokens``.
        """
        if layer in self._written:
            raise IntegrityError(f"layer {layer} of {self._resource.name!r} is written twice in one step")
        if self._lane_plan is not None:
            raise IntegrityError(f"{self._resource.name!r} cannot be written in a captured step")
        if self._frozen:
            raise IntegrityError(f"{self._resource.name!r} is frozen in this entry: it cannot be written")
        if self._places is None:
            self._places = self._resource.stage(self._rows, lengths)
            self._plans.clear()
        self._resource.memory.write(layer, self._places, k, v)
        self._written.add(layer)

    def attend(
        self, layer: int, q: Tensor, lengths: Sequence[int] | None = None, *, scale: float | None = None
    ) -> Tensor:
        """Attention ``[N, query_heads, head_dim]`` of *q* (same shape) over all of each row's memory, not causal.

        :param lengths: queries of each row, by default the rows' lengths in this step.
        """
        if self._lane_plan is not None:
            if lengths is not None:
                raise IntegrityError(f"a captured step reads {self._resource.name!r} with its rows' lengths only")
            return self._lane_plan.attend(layer, q, None, None, causal=False, scale=scale)
        key = tuple(lengths) if lengths is not None else tuple(row.length for row in self._rows)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._resource.plan_read(self._rows, key)
        return plan.attend(layer, q, None, None, causal=False, scale=scale)

    def keys(self, layer: int, row: int) -> Tensor:
        """The keys of the *row*-th row's memory ``[positions, kv_heads, head_dim]``, for a node that looks at the
        attention itself. They belong to the resource: do not change them."""
        if self._lane_plan is not None:
            raise IntegrityError(f"a captured step cannot look at single memories of {self._resource.name!r}")
        return self._resource.keys(layer, self._rows[row])


@dataclass(slots=True)
class _Last:
    """The last step on a lane: its rows, if they may come again as they are, and what they read."""

    rows: tuple[Row, ...] | None = None
    changes: int = 0
    batch: KVBatch | None = None


class CrossKV(SlotResource):
    """One slot per context, written once and read every step. Its view is a :class:`CrossView`.

    A written memory is seen by other steps once its step is committed; until then it lies in a slot that nothing reads.
    A captured step can read memories that were written before; one slot more than owners have, of a single position, is
    what its padding reads.
    """

    kind = "cross_kv"
    moves = True
    looks_at = ()
    speculates = True
    spec: specs.CrossKV

    def __init__(self, name: str, spec: specs.CrossKV, context: ResourceContext):
        slots = slot_count(name, spec.slots, context)
        super().__init__(name, spec, context, slots=slots)
        dtype = dtype_named(spec.dtype, context.dtype)
        need = AttentionNeed(
            "kv",
            torch.device(context.device),
            context.dtype,
            spec.query_heads,
            spec.kv_heads,
            spec.head_dim,
            spec.max_tokens,
            kv_dtype=dtype,
        )
        self.backend = pick_backend(context.attention_backends, need, spec.backend)
        slot_bytes = spec.max_tokens * KVMemory.token_bytes(spec.layers, spec.kv_heads, spec.head_dim, dtype)
        check_budget(name, f"{slots} slots of max_tokens={spec.max_tokens}", slots, slot_bytes, context, spare=1)
        self.memory = KVMemory(
            spec.layers, (slots + 1) * spec.max_tokens, spec.kv_heads, spec.head_dim, dtype, context.device
        )
        self._padding = slots
        self._lengths: dict[Owner, int] = {}  # of committed memories; open owners only
        self._staged: dict[Owner, int] = {}
        self._fresh: set[Owner] = set()  # whose memory their last step has written
        self._changes = 0  # counts what may put another memory in a row's place
        self.capturable, self.capturable_chunks = self.backend.capturable, self.backend.capturable_chunks

    def open(self, owner: Owner, request: EngineRequest) -> None:
        super().open(owner, request)
        self._changes += 1
        self._lengths.setdefault(owner, 0)

    def close(self, owner: Owner) -> None:
        super().close(owner)
        self._changes += 1
        self._lengths.pop(owner, None)
        self._staged.pop(owner, None)
        self._fresh.discard(owner)

    def export(self, owner: Owner) -> State:
        """``kv``: ``[layers, 2, positions, kv_heads, head_dim]``."""
        length, first = self._lengths[owner], self._slots[owner] * self.spec.max_tokens
        return State({"length": length}, {"kv": self.memory.data[:, :, first : first + length].clone()})

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)
        length, first = int(state.facts["length"]), self._slots[owner] * self.spec.max_tokens
        self.memory.data[:, :, first : first + length].copy_(state.tensors["kv"])
        self._lengths[owner] = length

    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        """Steps whose rows have no memory yet are to write it: they run without a graph."""
        return () if self.capturable and all(self._lengths[row.owner] for row in rows) else None

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> CrossView:
        stage = self.context.stage
        plan = None
        if stage.lane is not None:
            plan = self.backend.plan_kv(self.memory, self._lane_batch(rows, stage.lane), stage, self.name)
        view: CrossView = stage.keep(f"{self.name}.view", lambda: CrossView(self))
        view.fill(rows, frozen, plan)
        return view

    def _lane_batch(self, rows: Sequence[Row], lane: Lane) -> KVBatch:
        """What a step of *rows* on *lane* reads. Memories do not change: as long as a loop has the same rows, which are
        the same objects then, it is what the step before has read."""
        last: _Last = self.context.stage.keep(f"{self.name}.last", _Last)
        if last.batch is None or last.changes != self._changes or last.rows != (*rows,):
            lengths = self.context.stage.lengths(np.fromiter((row.length for row in rows), np.int64, len(rows)))
            last.batch, last.changes = self._batch(rows, lengths), self._changes
            last.rows = (*rows,) if lane.tokens == lane.rows else None
        return last.batch

    def stage(self, rows: Sequence[Row], memories: Sequence[int] | None = None) -> Tensor:
        """Places int64 ``[N]`` for the memories of *rows*, which :meth:`commit` makes theirs.

        :param memories: their lengths, by default the rows' own.
        """
        lengths = np.fromiter(memories or (row.length for row in rows), np.int64, len(rows))
        for row, length in zip(rows, lengths.tolist(), strict=True):
            if self._lengths[row.owner]:
                raise IntegrityError(f"the memory of {row.owner} in {self.name!r} was written before")
            if length > self.spec.max_tokens:
                raise RequestError(
                    f"an input of {length} encoder positions is longer than the {self.spec.max_tokens} that "
                    f"{self.name!r} holds (max_tokens)",
                    code="context_length_exceeded",
                )
            self._staged[row.owner] = length
        slots = self._slots.of(rows)
        _, places = flat_positions(slots * self.spec.max_tokens, lengths)
        return self.context.stage.put(f"{self.name}.places", places)

    def keys(self, layer: int, row: Row) -> Tensor:
        """The keys of *row*'s memory, a view ``[positions, kv_heads, head_dim]``."""
        length = self._staged.get(row.owner, 0) or self._lengths[row.owner]
        if not length:
            raise IntegrityError(f"the memory of {row.owner} in {self.name!r} is read before it was written")
        return self.memory.run(layer, self._slots[row.owner] * self.spec.max_tokens, length)[0]

    def plan_read(self, rows: Sequence[Row], lengths: Sequence[int] | npt.NDArray[np.int64]) -> KVPlan:
        """Plan *lengths* queries over the memories of *rows*."""
        return self.backend.plan_kv(self.memory, self._batch(rows, lengths), self.context.stage, self.name)

    def _batch(self, rows: Sequence[Row], lengths: Sequence[int] | npt.NDArray[np.int64]) -> KVBatch:
        """*lengths* queries over the memories of *rows*, and of padding if there are more."""
        memories = np.ones(len(lengths), np.int64)
        memories[: len(rows)] = [self._staged.get(row.owner, 0) or self._lengths[row.owner] for row in rows]
        for row, memory in zip(rows, memories.tolist(), strict=False):
            if not memory:
                raise IntegrityError(f"the memory of {row.owner} in {self.name!r} is read before it was written")
        tables = np.full((len(lengths), 1), self._padding, np.int32)
        tables[: len(rows), 0] = self._slots.of(rows)
        return KVBatch(np.asarray(lengths, np.int64), memories, tables, self.spec.max_tokens, step_kv="none")

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        for row in rows if self._staged or self._fresh else ():
            staged = self._staged.pop(row.owner, 0)
            if staged:
                self._lengths[row.owner] = staged
                self._fresh.add(row.owner)
            else:
                self._fresh.discard(row.owner)

    def retract(self, row: Row) -> None:
        if row.owner in self._fresh:
            self._fresh.remove(row.owner)
            self._changes += 1
            self._lengths[row.owner] = 0

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        for row in rows:
            self._staged.pop(row.owner, None)

    def device_bytes(self) -> int:
        return self.memory.data.nbytes

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        if not set(self._lengths) | set(self._staged) <= set(owners):
            raise IntegrityError(f"{self.name!r} remembers memories of owners that are closed")
