"""The sampling parameters of slots, and of the rows of one step gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn.sampling import GREEDY_BELOW
from mstar.resources.staging import to_device
from mstar.spec.errors import RequestError
from mstar.spec.request import SamplingParams

__all__ = ["Constraint", "ConstraintFactory", "RowParams", "SlotParams", "SlotTable", "words_of"]


class Constraint(Protocol):
    """What one request may say next: a grammar and how far the request is in it.

    The sampler asks for a mask in every step and accepts a token only when the step is committed, so a failed step
    needs no undo.
    """

    def mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into *row*, int32 ``[ceil(vocab / 32)]``: bit ``i % 32`` of word ``i // 32``
        is set when token *i* may. At least one must be. Asked again, it answers the same."""

    def accept(self, token: int) -> None:
        """*token*, one of those that :meth:`mask` allowed, has been generated."""


ConstraintFactory = Callable[[str, Sequence[int]], Constraint]
"""From :attr:`SamplingParams.grammar` and the request's stop ids to a fresh constraint. Raises ``RequestError``."""


@dataclass(slots=True)
class SlotParams:
    """What one owner samples with, prepared when it is opened.

    :param vocab: size of the logits.
    :param bias: token ids (int64 ``[n]``) and what is added to their logits (float32 ``[n]``).
    :param allowed: the tokens that may be sampled, as :meth:`Constraint.mask` writes them.
    :param stops: all but the ids that ``min_tokens`` forbids for a while, likewise.
    :param history: its row in the token histories that penalties read, or ``None``.
    """

    params: SamplingParams
    vocab: int
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    allowed: npt.NDArray[np.int32] | None = None
    stops: npt.NDArray[np.int32] | None = None
    constraint: Constraint | None = None
    history: int | None = None

    @classmethod
    def build(cls, params: SamplingParams, vocab: int) -> SlotParams:
        slot = cls(params, vocab)
        if params.logit_bias:
            ids = _checked(list(params.logit_bias), vocab, "logit_bias")
            slot.bias = (np.array(ids, np.int64), np.array(list(params.logit_bias.values()), np.float32))
        if params.allowed_token_ids:
            slot.allowed = bitmask(_checked(params.allowed_token_ids, vocab, "allowed_token_ids"), vocab)
        # A stop id beyond the logits (a tokenizer may be larger than the head) can never be sampled.
        stops = [i for i in params.stop_token_ids if 0 <= i < vocab]
        if params.min_tokens and stops and not params.ignore_eos:
            slot.stops = ~bitmask(stops, vocab)
        return slot

    @property
    def penalized(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0

    @property
    def masked(self) -> bool:
        """Whether some tokens may be impossible."""
        return self.allowed is not None or self.stops is not None or self.constraint is not None

    def mask(self, drawn: int, complete: bool) -> npt.NDArray[np.int32] | None:
        """Which tokens may come next, as :meth:`Constraint.mask` writes them; ``None``: all.

        Where a constraint allows stop tokens only, it is complete, and ``min_tokens`` gives way.

        :param drawn: tokens generated so far. :param complete: otherwise the token is of no consequence, and the
            constraint is not asked.
        :raises RequestError: the constraint allows none of the allowed tokens.
        """
        words = self.allowed
        if self.constraint is not None and complete:
            found = np.empty(words_of(self.vocab), np.int32)
            self.constraint.mask(found)
            words = found if words is None else found & words
            if not words.any():
                raise RequestError("the constraint allows none of the tokens that this request may use")
        if self.stops is not None and drawn < self.params.min_tokens:
            rest = self.stops if words is None else words & self.stops
            words = rest if rest.any() else words
        return words


def words_of(vocab: int) -> int:
    """Words of a mask over *vocab* tokens."""
    return -(-vocab // 32)


def bitmask(ids: Sequence[int], vocab: int) -> npt.NDArray[np.int32]:
    """The mask that allows *ids* only, int32 ``[ceil(vocab / 32)]``."""
    bits = np.zeros(words_of(vocab) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


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
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    """Places in the rows' logits, one row after the other, and what is added there."""
    penalties: Penalties | None = None
    sorting: Sorting | None = None
    min_p: Tensor | None = None
    filters: bool = False
    reports: Reports | None = None
    minimums: list[tuple[int, int]] = field(default_factory=list)
    """(slot, min_tokens) of rows that may not stop at first."""
    masked: list[tuple[int, SlotParams]] = field(default_factory=list)
    """Rows of which some tokens may be impossible."""
    constrained: list[int] = field(default_factory=list)
    """Of these, the ones with a constraint."""
    always: bool = False
    """Whether the logits are changed in every step; ``minimums`` change them only at first."""

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
            if state.masked:
                rows.masked.append((row, state))
            if state.stops is not None:
                rows.minimums.append((slot, state.params.min_tokens))
            if state.constraint is not None:
                rows.constrained.append(row)
        lasting = any(state.allowed is not None for _, state in rows.masked) or bool(rows.constrained)
        rows.always = lasting or rows.bias is not None or rows.penalties is not None
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


def _gather_bias(states: Sequence[SlotParams]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
    found = [(row * s.vocab, *s.bias) for row, s in enumerate(states) if s.bias is not None]
    if not found:
        return None
    return np.concatenate([start + ids for start, ids, _ in found]), np.concatenate([values for *_, values in found])


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
