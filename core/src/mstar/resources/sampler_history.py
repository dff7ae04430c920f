"""Which tokens a slot has seen: what the repetition, frequency and presence penalties read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mstar.nn.sampling import penalize_counts, penalize_repetition
from mstar.resources.base import IntegrityError
from mstar.resources.sampler_rows import Penalties
from mstar.resources.staging import to_device

__all__ = ["GROUP", "TokenHistories", "flags_of"]

COUNT = (1 << 30) - 1
"""Bits of a mark that count; the one above says that the token was in the prompt."""
_IN_PROMPT = 1 << 30

GROUP = 8
"""Neighbouring tokens that share a flag: a GPU reads as many marks at once. :mod:`mstar.nn.ops.cuda_edits` knows it."""

_COLUMNS = 64
"""Listed tokens are read and allocated in multiples of this."""


class TokenHistories:
    """Token counts of the slots that use a penalty.

    ``marks``, int32 ``[rows, vocab]``: how often every token was generated, and a bit more if it was in the prompt.
    Row 0 is nobody's and stays 0.

    With *rows* the table has that many for owners and stays where it is, as captured graphs need it. There are also
    ``flags`` then, uint8 ``[rows, ceil(vocab / 8)]``: not 0 where one of :data:`GROUP` neighbouring tokens has a mark
    (or had one), so that a kernel need not read all marks to find them.

    Without *rows* the table grows by doubling and those who use no penalty take no memory; then the tokens seen are
    listed instead (``listed``, int64 ``[rows, columns]``), so that :meth:`penalize` touches only these and costs by the
    text, not by the vocabulary. The list may repeat a token, and is filled up with token 0: writing the same new score
    twice, or an unseen token's own score, changes nothing.
    """

    def __init__(self, vocab: int, device: torch.device, rows: int | None = None):
        held = 1 + (rows or 0)
        self.marks = torch.zeros(held, vocab, dtype=torch.int32, device=device)
        self.flags, self.listed = None, None
        if rows is not None:
            self.flags = torch.zeros(held, flags_of(vocab), dtype=torch.uint8, device=device)
        else:
            self.listed = torch.zeros(held, _COLUMNS, dtype=torch.int64, device=device)
        self._length = np.zeros(held, dtype=np.int64)  # of the listed ones
        self._free = list(range(held - 1, 0, -1))

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in (self.marks, self.flags, self.listed) if table is not None)

    @property
    def used(self) -> int:
        return len(self._length) - 1 - len(self._free)

    def take(self) -> int:
        """A row without history."""
        if not self._free:
            self._more_rows()
        row = self._free.pop()
        self.marks[row] = 0
        if self.flags is not None:
            self.flags[row] = 0
        if self.listed is not None:
            self.listed[row] = 0
        self._length[row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def seen(self, row: int) -> dict[str, Tensor]:
        """What *row* has seen, for :meth:`put`: ``marks`` int32 ``[vocab]``, and the tokens if they are listed."""
        found = {"marks": self.marks[row].clone()}
        if self.listed is not None:
            found["listed"] = self.listed[row, : int(self._length[row])].clone()
        return found

    def put(self, row: int, seen: Mapping[str, Tensor]) -> None:
        """*row* has seen what a row of another table had."""
        self.marks[row] = seen["marks"]
        if self.flags is not None:
            self.flags[row, self.marks[row].nonzero().squeeze(1) // GROUP] = 1
        if self.listed is not None:
            listed = seen["listed"]
            self._widen(self.listed, len(listed))[row, : len(listed)] = listed
            self._length[row] = len(listed)

    def to_prompt(self, row: int) -> None:
        """What was generated so far counts as prompt from now on."""
        self.marks[row] = (self.marks[row] != 0).to(torch.int32) * _IN_PROMPT

    def add_prompt(self, row: int, ids: np.ndarray) -> None:
        """*ids* ``[T]`` were read, and nothing was generated yet. Placeholders of media outside the vocabulary are no
        tokens that could repeat."""
        known = np.unique(ids[(ids >= 0) & (ids < self.marks.shape[1])]).astype(np.int64)
        fresh = to_device(known, self.marks.device)
        self.marks[row, fresh] = _IN_PROMPT
        if self.flags is not None:
            self.flags[row, fresh // GROUP] = 1
        if self.listed is not None:
            begin, end = self._length[row], self._length[row] + len(known)
            self._widen(self.listed, int(end))[row, begin:end] = fresh
            self._length[row] = end

    def add(self, penalties: Penalties, ids: Tensor, complete: np.ndarray) -> None:
        """The step's rows generated *ids* (int64 ``[step rows]``); those that are not *complete* (bool) count for
        nothing: they write 0 more occurrences, and a list entry that the next token will overwrite."""
        done = complete[penalties.host_rows]
        device = self.marks.device
        mine = ids[penalties.rows].clamp(min=0)  # a row that failed has no token, and ends
        amount = to_device(done.astype(np.int32), device)
        # One kernel, where index_put_ would sort the places first.
        self.marks.view(-1).index_add_(0, penalties.histories * self.marks.shape[1] + mine, amount)
        if self.flags is not None:
            self.flags.view(-1).index_fill_(0, penalties.histories * self.flags.shape[1] + mine // GROUP, 1)
        if self.listed is not None:
            columns = self._length[penalties.host_histories]
            listed = self._widen(self.listed, int(columns.max()) + 1)
            listed.index_put_((penalties.histories, to_device(columns, device)), mine)
            self._length[penalties.host_histories] += done

    def take_back(self, row: int, token: Tensor) -> None:
        """*token* (int64, no dimensions), the last that was added to *row*, was not generated after all."""
        if self.listed is not None:
            self._length[row] -= 1
        self.marks[row].index_add_(0, token.reshape(1).clamp(min=0), self.marks.new_full((1,), -1))

    def penalize(self, scores: Tensor, penalties: Penalties) -> None:
        """Apply the penalties to *scores* (float32 ``[step rows, vocab]``) in place, by the listed tokens."""
        assert self.listed is not None
        longest = int(self._length[penalties.host_histories].max())
        if longest == 0:
            return
        ids = self.listed[penalties.histories, : _rounded(longest)]
        marks = self.marks[penalties.histories.unsqueeze(1), ids]
        where = (penalties.rows.unsqueeze(1), ids)
        edited = penalize_repetition(scores[where], marks != 0, penalties.repetition)
        scores.index_put_(where, penalize_counts(edited, marks & COUNT, penalties.frequency, penalties.presence))

    def _more_rows(self) -> None:
        if self.listed is None:
            raise IntegrityError("more token histories are in use than there are owners")
        held = len(self._length)
        more = max(held - 1, 4)
        self.marks, self.listed = _grow(self.marks, more, 0), _grow(self.listed, more, 0)
        self._length = np.concatenate([self._length, np.zeros(more, dtype=np.int64)])
        self._free = list(range(held + more - 1, held - 1, -1))

    def _widen(self, listed: Tensor, columns: int) -> Tensor:
        """The list, with room for *columns*."""
        held = listed.shape[1]
        if columns > held:
            listed = self.listed = _grow(listed, max(_rounded(columns) - held, held), 1)
        return listed


def flags_of(vocab: int) -> int:
    """Flags of a row."""
    return -(-vocab // GROUP)


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS


def _grow(table: Tensor, more: int, dim: int) -> Tensor:
    """*table* with *more* zeros along *dim*; an ordinary tensor, because it is written in and out of inference mode."""
    shape = list(table.shape)
    shape[dim] = more
    with torch.inference_mode(False):
        return torch.cat([table, table.new_zeros(shape)], dim=dim)
