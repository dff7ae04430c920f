"""Where each token of a step stands in its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row, State
from mstar.resources.slotted import SlotResource
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions

__all__ = ["PositionsResource", "PositionsView"]


@dataclass(frozen=True, slots=True)
class PositionsView:
    """``positions``: int64 ``[N]`` (one axis) or ``[axes, N]``, N the step's tokens in row order."""

    positions: Tensor


@dataclass(slots=True)
class _Explicit:
    """Positions that a request brought for its prompt. *given* ``[axes, T]``; *start*: tokens in the context before."""

    start: int
    given: np.ndarray


class PositionsResource(SlotResource):
    """Kind ``positions``: 0, 1, 2… per context, over one or several axes.

    A request may bring explicit positions for its prompt (input ``spec.prompt``, integers ``[axes, T]``). Later tokens
    go on from one more than the largest of them, alike on all axes: Qwen2-VL's multimodal rope, where the difference
    between a token's position and its index is called the mrope delta. When a session goes on with a further request,
    that one's explicit positions are shifted to begin where the context stands.
    """

    kind = "positions"
    moves = True
    looks_at = ("prompt",)
    batch_invariant = True
    capturable = True
    capturable_chunks = True
    speculates = True
    spec: Positions

    def __init__(self, name: str, spec: Positions, context: ResourceContext):
        super().__init__(name, spec, context, slots=context.max_owners)
        self._device = torch.device(context.device)
        self._tokens = np.zeros(context.max_owners, dtype=np.int64)
        self._delta = np.zeros(context.max_owners, dtype=np.int64)
        self._explicit: dict[int, _Explicit] = {}
        self._planned: tuple[np.ndarray, np.ndarray] | None = None

    # --- life -------------------------------------------------------------------------------------------------------
    def open(self, owner: Owner, request: EngineRequest) -> None:
        slot = self._slots[owner]
        given = self._given(request)
        if owner not in self._open:
            self._tokens[slot] = self._delta[slot] = 0
        self._explicit.pop(slot, None)
        if given is not None:
            start = int(self._tokens[slot])
            given = given + (start + self._delta[slot])
            self._explicit[slot] = _Explicit(start, given)
            self._delta[slot] = given.max() + 1 - (start + given.shape[1])
        self._open.add(owner)

    def _given(self, request: EngineRequest) -> np.ndarray | None:
        name = self.spec.prompt
        if name is None or request.inputs.get(name) is None:
            return None
        given = np.asarray(request.inputs[name])
        if given.ndim != 2 or given.shape[0] != self.spec.axes or given.dtype.kind not in "iu" or not given.size:
            raise RequestError(
                f"{name}: expected integer positions [{self.spec.axes}, T], got {given.dtype} {list(given.shape)}",
                param=name,
            )
        return given.astype(np.int64)

    def close(self, owner: Owner) -> None:
        self._explicit.pop(self._slots[owner], None)
        super().close(owner)

    def export(self, owner: Owner) -> State:
        """``explicit``: int64 ``[axes, T]``, what is left of a prompt's own positions."""
        slot = self._slots[owner]
        explicit = self._explicit.get(slot)
        facts = {"tokens": int(self._tokens[slot]), "delta": int(self._delta[slot])}
        if explicit is None:
            return State(facts, {})
        return State({**facts, "start": explicit.start}, {"explicit": torch.tensor(explicit.given)})

    def adopt(self, owner: Owner, request: EngineRequest, state: State) -> None:
        slot = self._slots[owner]
        self._tokens[slot], self._delta[slot] = state.facts["tokens"], state.facts["delta"]
        if "explicit" in state.tensors:
            self._explicit[slot] = _Explicit(state.facts["start"], state.tensors["explicit"].cpu().numpy())
        self._open.add(owner)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        self._tokens[self._slots[owner]] += len(ids)

    # --- a step -------------------------------------------------------------------------------------------------------
    def plan(self, rows: Sequence[Row], frozen: bool = False) -> PositionsView:
        slots = self._slots.of(rows)
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        self._planned = (slots, lengths)
        positions = self._in_order(slots, lengths)
        stage = self.context.stage
        if stage.lane is not None:  # padding may stand anywhere
            positions = np.concatenate((positions, np.zeros(stage.lane.tokens - len(positions), np.int64)))
        if self.spec.axes > 1:
            positions = np.repeat(positions[None], self.spec.axes, axis=0)
        if self._explicit:
            self._insert_explicit(positions, slots, lengths)
        return PositionsView(stage.put(f"{self.name}.positions", np.ascontiguousarray(positions)))

    def _in_order(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Index in the context plus delta, ``[N]``."""
        first: np.ndarray = self._tokens[slots] + self._delta[slots]
        total = int(lengths.sum())
        if total == len(slots) and (lengths == 1).all():
            return first
        begins = lengths.cumsum() - lengths
        return np.asarray(np.arange(total, dtype=np.int64) + np.repeat(first - begins, lengths))

    def _insert_explicit(self, positions: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Overwrite the tokens that lie in a prompt with explicit positions."""
        table = positions.reshape(self.spec.axes, -1)
        begin = 0
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            explicit = self._explicit.get(slot)
            if explicit is not None:
                done = int(self._tokens[slot]) - explicit.start
                part = explicit.given[:, done : done + length]
                table[:, begin : begin + part.shape[1]] = part
            begin += length

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        planned, self._planned = self._planned, None
        if planned is None:
            raise IntegrityError(f"{self.name}: commit without a plan")
        if frozen:
            return
        slots, lengths = planned
        self._tokens[slots] += lengths
        if self._explicit:
            self._forget_prompts(slots.tolist())

    def _forget_prompts(self, slots: list[int]) -> None:
        """Drop explicit positions that lie wholly behind: decoding then costs what it costs without them."""
        for slot in slots:
            explicit = self._explicit.get(slot)
            if explicit is not None and self._tokens[slot] >= explicit.start + explicit.given.shape[1]:
                del self._explicit[slot]

    def retract(self, row: Row) -> None:
        self._tokens[self._slots[row.owner]] -= row.length

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        self._planned = None
