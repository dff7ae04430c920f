"""The sampling parameters of slots, and of the rows of one step gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mstar.nn.sampling import GREEDY_BELOW
from mstar.resources.staging import to_device
from mstar.spec.errors import RequestError
from mstar.spec.request import SamplingParams

__all__ = ["Constraint", "ConstraintFactory", "RowParams", "SlotParams", "SlotTable"]


class Constraint(Protocol):
    """What one request may say next: a grammar and how far the request is in it.

    The sampler asks for a mask in every step and accepts a token only when the step is committed, so a failed step
    needs no undo.
    """

    def mask(self, row: Tensor) -> None:
        """Write which tokens may come next into *row*, int32 ``[ceil(vocab / 32)]`` on the CPU: bit ``i % 32`` of word
        ``i // 32`` is set when token *i* may. At least one must be."""

    def accept(self, token: int) -> None:
        """*token*, one of those that :meth:`mask` allowed, has been generated."""


ConstraintFactory = Callable[[str, int], Constraint]
"""From :attr:`SamplingParams.grammar` and the size of the vocabulary to a fresh constraint. Raises ``RequestError``."""


@dataclass(slots=True)
class SlotParams:
    """What one owner samples with, prepared when it is opened. Tensors are on the sampler's device.

    :param history: its row in the token histories that penalties read, or ``None``.
    :param stops: ids that ``min_tokens`` forbids for a while. :param allowed: bool ``[vocab]``.
    """

    params: SamplingParams
    bias: tuple[Tensor, Tensor] | None = None
    allowed: Tensor | None = None
    stops: Tensor | None = None
    constraint: Constraint | None = None
    history: int | None = None

    @classmethod
    def build(cls, params: SamplingParams, vocab: int, device: torch.device) -> SlotParams:
        slot = cls(params)
        if params.logit_bias:
            ids = _checked(list(params.logit_bias), vocab, "logit_bias")
            values = to_device(list(params.logit_bias.values()), device, torch.float32)
            slot.bias = (to_device(ids, device), values)
        if params.allowed_token_ids:
            ids = _checked(params.allowed_token_ids, vocab, "allowed_token_ids")
            slot.allowed = torch.zeros(vocab, dtype=torch.bool, device=device)
            slot.allowed[to_device(ids, device)] = True
        # A stop id beyond the logits (a tokenizer may be larger than the head) can never be sampled.
        stops = [i for i in params.stop_token_ids if 0 <= i < vocab]
        if params.min_tokens and stops and not params.ignore_eos:
            slot.stops = to_device(stops, device)
        return slot

    @property
    def penalized(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _checked(ids: Sequence[int], vocab: int, param: str) -> list[int]:
    for i in ids:
        if not 0 <= i < vocab:
            raise RequestError(f"{param}: token id {i} is not in the vocabulary (0 to {vocab - 1})", param=param)
    return list(ids)


class SlotTable:
    """The numeric parameters of all slots as device tensors, so that a step gathers them with two index operations, or
    a kernel reads them by slot."""

    INVERSE_TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, GREEDY = range(7)
    """Columns of ``floats``. :mod:`mstar.nn.ops.cuda_sampling` knows them too."""

    def __init__(self, slots: int, device: torch.device):
        self.floats = torch.zeros(slots, 7, device=device)  # float32
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)

    def set(self, slot: int, params: SamplingParams) -> None:
        greedy = params.temperature < GREEDY_BELOW
        values = (
            1.0 if greedy else 1.0 / params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            float(greedy),
        )
        self.floats[slot].copy_(to_device(values, self.floats.device, torch.float32))
        self.top_k[slot].fill_(params.top_k)


class Penalties(NamedTuple):
    """``[n]`` each: rows with a penalty, their rows in the token histories (both also on the host), three strengths."""

    rows: Tensor
    host_rows: np.ndarray
    histories: Tensor
    host_histories: np.ndarray
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class Sorting(NamedTuple):
    """Rows with top-k or top-p (``None``: all) and their values. *top_p* is ``None`` when no row uses it."""

    rows: Tensor | None
    top_k: Tensor
    top_p: Tensor | None
    max_k: int


class Reports(NamedTuple):
    """Rows that want log-probabilities, as tensor and list, and how many alternatives each."""

    where: Tensor
    rows: list[int]
    alternatives: list[int]


@dataclass(slots=True)
class RowParams:
    """The parameters of one set of rows, in row order. Built when the set changes, then used step after step.

    :param all_greedy: no row draws. :param greedy: bool ``[rows]``, or ``None`` when all rows draw.
    :param inverse_temperature: ``[rows, 1]``, 1 in greedy rows.
    :param filters: whether any row drops unlikely tokens.
    """

    slots: np.ndarray
    all_greedy: bool
    greedy: Tensor | None
    inverse_temperature: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    allowed: tuple[Tensor, Tensor] | None = None
    penalties: Penalties | None = None
    sorting: Sorting | None = None
    min_p: Tensor | None = None
    filters: bool = False
    reports: Reports | None = None
    minimums: list[tuple[int, int, int, Tensor]] = field(default_factory=list)
    """(row, slot, min_tokens, stop ids) of rows that may not stop at first."""
    constraints: list[tuple[int, Constraint]] = field(default_factory=list)

    @property
    def edits(self) -> bool:
        """Whether the logits are changed in every step (``minimums`` change them only at first)."""
        return bool(self.bias or self.allowed or self.penalties or self.constraints)

    @classmethod
    def gather(cls, slots: Sequence[int], states: Sequence[SlotParams], table: SlotTable, by_slot: bool) -> RowParams:
        """*by_slot*: a kernel reads temperature and filters from *table*; they are not gathered."""
        device = table.floats.device
        greedy = [s.params.temperature < GREEDY_BELOW for s in states]
        rows = cls(
            slots=np.array(slots, dtype=np.int64),
            all_greedy=all(greedy),
            greedy=None,
            inverse_temperature=table.floats[:0],
            bias=_gather_bias(states),
            allowed=_gather_allowed(states),
            penalties=_gather_penalties(slots, states, table),
            reports=_gather_reports(states, device),
        )
        drawing = [(row, s.params) for row, s in enumerate(states) if not greedy[row]]
        sort = [row for row, p in drawing if p.top_k > 0 or p.top_p < 1]
        any_min_p = any(p.min_p > 0 for _, p in drawing)
        rows.filters = bool(sort) or any_min_p
        if not by_slot:
            rows.greedy = to_device(greedy, device) if any(greedy) else None
            rows._gather_filters(slots, states, table, sort, any_min_p)
        for row, (slot, state) in enumerate(zip(slots, states, strict=True)):
            if state.stops is not None:
                rows.minimums.append((row, slot, state.params.min_tokens, state.stops))
            if state.constraint is not None:
                rows.constraints.append((row, state.constraint))
        return rows

    def _gather_filters(
        self, slots: Sequence[int], states: Sequence[SlotParams], table: SlotTable, sort: list[int], any_min_p: bool
    ) -> None:
        number = to_device(slots, table.floats.device, torch.int64)
        floats, top_k = table.floats[number], table.top_k[number]
        self.inverse_temperature = floats[:, SlotTable.INVERSE_TEMPERATURE].unsqueeze(1)
        if sort:
            index = to_device(sort, floats.device)
            nucleus = any(states[row].params.top_p < 1 for row in sort)
            self.sorting = Sorting(
                None if len(sort) == len(states) else index,
                top_k[index],
                floats[index, SlotTable.TOP_P] if nucleus else None,
                max(states[row].params.top_k for row in sort),
            )
        self.min_p = floats[:, SlotTable.MIN_P] if any_min_p else None


def _gather_bias(states: Sequence[SlotParams]) -> tuple[Tensor, Tensor, Tensor] | None:
    found = [(row, s.bias) for row, s in enumerate(states) if s.bias is not None]
    if not found:
        return None
    rows = torch.cat([torch.full_like(ids, row) for row, (ids, _) in found])
    return rows, torch.cat([ids for _, (ids, _) in found]), torch.cat([values for _, (_, values) in found])


def _gather_allowed(states: Sequence[SlotParams]) -> tuple[Tensor, Tensor] | None:
    found = [(row, s.allowed) for row, s in enumerate(states) if s.allowed is not None]
    if not found:
        return None
    masks = torch.stack([mask for _, mask in found])
    return to_device([row for row, _ in found], masks.device), masks


def _gather_penalties(slots: Sequence[int], states: Sequence[SlotParams], table: SlotTable) -> Penalties | None:
    found = [(row, s.history) for row, s in enumerate(states) if s.history is not None]
    if not found:
        return None
    floats = table.floats
    params = floats[to_device([slots[row] for row, _ in found], floats.device)]
    rows, histories = np.array(found, dtype=np.int64).T.copy()
    index = to_device(rows, floats.device)
    return Penalties(
        index,
        rows,
        to_device(histories, floats.device),
        histories,
        *(params[:, c] for c in (SlotTable.REPETITION, SlotTable.FREQUENCY, SlotTable.PRESENCE)),
    )


def _gather_reports(states: Sequence[SlotParams], device: torch.device) -> Reports | None:
    found = [(row, s.params.logprobs) for row, s in enumerate(states) if s.params.logprobs is not None]
    if not found:
        return None
    rows = [row for row, _ in found]
    return Reports(to_device(rows, device), rows, [n for _, n in found])
