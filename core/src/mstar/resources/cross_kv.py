"""Keys and values of an encoder's output: the ``cross_kv`` resource."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, KVPlan, pick_backend
from mstar.resources.attention.memory import dtype_named
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.paged_kv import flat_positions
from mstar.resources.slotted import SlotResource, check_budget, slot_count
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest

__all__ = ["CrossKV", "CrossView"]


class CrossView:
    """What a node uses: :meth:`write` in the entry that has the encoder's output, :meth:`attend` in the one that
    reads."""

    def __init__(self, resource: CrossKV, rows: Sequence[Row], frozen: bool):
        self._resource, self._rows, self._frozen = resource, rows, frozen
        self._places: Tensor | None = None
        self._written: set[int] = set()
        self._plans: dict[tuple[int, ...], KVPlan] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the memory of each row: *k*, *v* packed ``[N, kv_heads, head_dim]``, a row's length being its memory's.

        :raises IntegrityError: a row's memory was written before: it can be written once.
        :raises RequestError: a memory is longer than ``max_tokens``.
        """
        if layer in self._written:
            raise IntegrityError(f"layer {layer} of {self._resource.name!r} is written twice in one step")
        if self._frozen:
            raise IntegrityError(f"{self._resource.name!r} is frozen in this entry: it cannot be written")
        if self._places is None:
            self._places = self._resource.stage(self._rows)
            self._plans.clear()
        self._resource.memory.write(layer, self._places, k, v)
        self._written.add(layer)

    def attend(
        self, layer: int, q: Tensor, lengths: Sequence[int] | None = None, *, scale: float | None = None
    ) -> Tensor:
        """Attention ``[N, query_heads, head_dim]`` of *q* (same shape) over all of each row's memory, not causal.

        :param lengths: queries of each row, by default the rows' lengths in this step.
        """
        key = tuple(lengths) if lengths is not None else tuple(row.length for row in self._rows)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._resource.plan_read(self._rows, key)
        return plan.attend(layer, q, None, None, causal=False, scale=scale)


class CrossKV(SlotResource):
    """One slot per context, written once and read every step. Its view is a :class:`CrossView`.

    A written memory is seen by other steps once its step is committed; until then it lies in a slot that nothing reads.
    """

    kind = "cross_kv"
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
        check_budget(name, f"{slots} slots of max_tokens={spec.max_tokens}", slots, slot_bytes, context)
        self.memory = KVMemory(
            spec.layers, slots * spec.max_tokens, spec.kv_heads, spec.head_dim, dtype, context.device
        )
        self._lengths: dict[Owner, int] = {}  # of committed memories; open owners only
        self._staged: dict[Owner, int] = {}

    def open(self, owner: Owner, request: EngineRequest) -> None:
        super().open(owner, request)
        self._lengths.setdefault(owner, 0)

    def close(self, owner: Owner) -> None:
        super().close(owner)
        self._lengths.pop(owner, None)
        self._staged.pop(owner, None)

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> CrossView:
        return CrossView(self, rows, frozen)

    def stage(self, rows: Sequence[Row]) -> Tensor:
        """Places int64 ``[N]`` for the memories of *rows*, which :meth:`commit` makes theirs."""
        for row in rows:
            if self._lengths[row.owner]:
                raise IntegrityError(f"the memory of {row.owner} in {self.name!r} was written before")
            if row.length > self.spec.max_tokens:
                raise RequestError(
                    f"an input of {row.length} encoder positions is longer than the {self.spec.max_tokens} that "
                    f"{self.name!r} holds (max_tokens)",
                    code="context_length_exceeded",
                )
        self._staged.update((row.owner, row.length) for row in rows)
        slots = np.fromiter((self._slots[row.owner] for row in rows), np.int64, len(rows))
        lengths = np.fromiter((row.length for row in rows), np.int64, len(rows))
        _, places = flat_positions(slots * self.spec.max_tokens, lengths)
        return self.context.stage.put(f"{self.name}.places", places)

    def plan_read(self, rows: Sequence[Row], lengths: Sequence[int]) -> KVPlan:
        """Plan *lengths* queries over the memories of *rows*."""
        memories = [self._staged.get(row.owner, 0) or self._lengths[row.owner] for row in rows]
        for row, memory in zip(rows, memories, strict=True):
            if not memory:
                raise IntegrityError(f"the memory of {row.owner} in {self.name!r} is read before it was written")
        tables = np.fromiter((self._slots[row.owner] for row in rows), np.int32, len(rows))[:, None]
        batch = KVBatch(
            np.asarray(lengths, np.int64), np.asarray(memories, np.int64), tables, self.spec.max_tokens, step_kv="none"
        )
        return self.backend.plan_kv(self.memory, batch, self.context.stage, self.name)

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        if self._staged:
            for row in rows:
                if row.owner in self._staged:
                    self._lengths[row.owner] = self._staged.pop(row.owner)

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        for row in rows:
            self._staged.pop(row.owner, None)

    def device_bytes(self) -> int:
        return self.memory.data.nbytes

    def check(self, owners: Sequence[Owner]) -> None:
        super().check(owners)
        if not set(self._lengths) | set(self._staged) <= set(owners):
            raise IntegrityError(f"{self.name!r} remembers memories of owners that are closed")
