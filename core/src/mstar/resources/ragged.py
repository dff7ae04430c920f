"""Attention within each row of a step, without a cache: the ``ragged_attention`` resource."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.resources.attention import AttentionBackend, AttentionNeed, RaggedPlan, pick_backend
from mstar.resources.base import IntegrityError, Owner, Resource, ResourceContext, Row, State, Usage
from mstar.resources.staging import Stage
from mstar.spec import resources as specs
from mstar.spec.errors import MstarError, RequestError
from mstar.spec.request import EngineRequest

__all__ = ["RaggedAttention", "RaggedView"]


class RaggedView:
    """What a node uses: attention within each row, or within given segments."""

    def __init__(self, backend: AttentionBackend, stage: Stage, key: str):
        self._backend, self._stage, self._key = backend, stage, key
        self._plans: dict[tuple[int, ...], RaggedPlan] = {}
        self._lane_plan: RaggedPlan | None = None

    def fill(self, lengths: Sequence[int], plan: RaggedPlan | None) -> None:
        """Plan a step whose rows have *lengths*. *plan*: theirs on a lane, the same in each step."""
        self._lengths, self._lane_plan = tuple(lengths), plan
        self._plans.clear()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Attention ``[N, heads, head_dim]`` of packed *q* over packed *k*, *v* ``[N, kv_heads, head_dim]``.

        :param lengths: lengths of consecutive segments that attend within themselves, by default the rows' lengths
            (windows of a ViT, chunks of an audio encoder: several segments a row). They must add up to ``N``. A step
            with segments of its own runs without a graph: a capture would hold on to them.
        """
        if self._lane_plan is not None:
            if lengths is not None:
                raise MstarError("attention within given segments")
            return self._lane_plan.attend(q, k, v, causal=causal, scale=scale)
        segments = self._lengths if lengths is None else tuple(lengths)
        plan = self._plans.get(segments)
        if plan is None:
            plan = self._plans[segments] = self._backend.plan_ragged(segments, self._stage, self._key)
        if sum(segments) != q.shape[0]:
            raise MstarError(f"segments of {sum(segments)} items in all for {q.shape[0]} packed items")
        return plan.attend(q, k, v, causal=causal, scale=scale)

    def attend_windows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within windows of one length: *q* ``[windows, length, heads, head_dim]``, *k* and *v* ``[windows,
        length, kv_heads, head_dim]``; gives a tensor like *q*. Their numbers are those of a step's inputs, stacked
        ones, so that captured steps have them too, if the backend has plans that stay."""
        windows, length = q.shape[:2]
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        if self._lane_plan is None:
            return self.attend(*packed, lengths=[length] * windows).view(q.shape)
        plan = self._backend.plan_windows(windows, length)
        if plan is None:
            raise MstarError("attention within windows")
        return plan.attend(*packed).view(q.shape)


_SEGMENTS = (17, 65)
"""To how many segments captured steps are filled up, if rows have several; one of them is the padding's."""


class RaggedAttention(Resource):
    """No state but the segments that a request may bring: every context is admitted and costs nothing. Its view is a
    :class:`RaggedView`."""

    kind = "ragged_attention"
    moves = True
    looks_at = ("segments",)
    speculates = True
    spec: specs.RaggedAttention

    def __init__(self, name: str, spec: specs.RaggedAttention, context: ResourceContext):
        super().__init__(name, spec, context)
        need = AttentionNeed(
            "ragged", torch.device(context.device), context.dtype, spec.heads, spec.kv_heads, spec.head_dim
        )
        self.backend = pick_backend(context.attention_backends, need, spec.backend)
        self._owners: set[Owner] = set()
        self._ends: dict[Owner, npt.NDArray[np.int64]] = {}  # where a request's segments end
        self.capturable = self.backend.capturable_beside
        self.capturable_chunks = self.backend.capturable_beside and self.backend.capturable_chunks

    def units(self, tokens: int) -> int:
        return 0

    def capacity(self) -> int:
        return 0

    def reserve(self, owner: Owner, units: int) -> bool:
        self._owners.add(owner)
        return True

    def export(self, owner: Owner) -> State:
        return State({}, {})  # what there is comes with the request

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        self.open(owner, request)

    def open(self, owner: Owner, request: EngineRequest) -> None:
        if owner not in self._owners:
            raise IntegrityError(f"{owner} has no reservation in {self.name!r}")
        given = None if self.spec.segments is None else request.inputs.get(self.spec.segments)
        if given is not None:
            table = np.asarray(given)
            lengths = table.reshape(len(table), -1)[:, 0] if table.size else table
            if table.dtype.kind not in "iu" or (lengths < 1).any():
                message = f"{self.spec.segments}: expected the lengths of segments, got {table.dtype} {table.shape}"
                raise RequestError(message, param=self.spec.segments)
            self._ends[owner] = np.cumsum(lengths.astype(np.int64))

    def close(self, owner: Owner) -> None:
        if owner not in self._owners:
            raise IntegrityError(f"{owner} is not open in {self.name!r}")
        self._owners.remove(owner)
        self._ends.pop(owner, None)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        """Nothing to take over."""

    def variant(self, rows: Sequence[Row], frozen: bool = False) -> Hashable | None:
        if not self.capturable:
            return None
        if self.spec.segments is None:
            return ()
        # one more than there are: the padding's
        count = sum(len(self._segments(row)) for row in rows) + 1
        return next((size for size in _SEGMENTS if size >= count), None)

    def _segments(self, row: Row) -> list[int]:
        """Lengths of the segments of *row*'s items."""
        ends = self._ends.get(row.owner)
        if ends is None:
            return [row.length]
        end = row.start + row.length
        first, last = np.searchsorted(ends, (row.start, end - 1), side="right")
        inside = np.minimum(ends[first : last + 1], end)
        return np.diff(inside, prepend=row.start).tolist()  # type: ignore[no-any-return]

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        """Of the rows, or of their segments; on a lane those of the padding besides."""
        stage = self.context.stage
        if self.spec.segments is None:
            return stage.lengths(np.fromiter((row.length for row in rows), np.int64, len(rows))).tolist()  # type: ignore[no-any-return]
        lengths = [length for row in rows for length in self._segments(row)]
        if stage.lane is not None:
            room: int = stage.lane.variants[self.name]  # type: ignore[assignment]
            lengths += [stage.lane.tokens - sum(lengths), *[0] * (room - len(lengths) - 1)]
        return lengths

    def plan(self, rows: Sequence[Row], frozen: bool = False) -> RaggedView:
        stage = self.context.stage
        lengths = self._lengths(rows)
        view: RaggedView = stage.keep(f"{self.name}.view", lambda: RaggedView(self.backend, stage, self.name))
        view.fill(lengths, None if stage.lane is None else self.backend.plan_ragged(lengths, stage, self.name))
        return view

    def retract(self, row: Row) -> None:
        """Nothing to undo."""

    def usage(self) -> Usage:
        return Usage(0, 0)

    def check(self, owners: Sequence[Owner]) -> None:
        if set(owners) != self._owners:
            raise IntegrityError(
                f"{self.name!r} is open for {sorted(self._owners)} but open owners are {sorted(owners)}"
            )
