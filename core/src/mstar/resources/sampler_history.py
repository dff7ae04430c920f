"""Which tokens a slot has seen: what the repetition, frequency and presence penalties read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.nn.sampling import penalize_counts, penalize_repetition
from mstar.resources.sampler_rows import Penalties
from mstar.resources.staging import to_device

__all__ = ["TokenHistories"]

_COLUMNS = 64
"""Listed tokens are read and allocated in multiples of this."""


class TokenHistories:
    """Token counts of the slots that use a penalty; others take no memory. Its tensors grow by doubling.

    Each row knows how often every token was generated (``counts``, int32 ``[rows, vocab]``), whether it was in the
    prompt (``prompt``, bool), and lists the tokens seen (``listed``, int64 ``[rows, columns]``). Penalties touch only
    listed tokens, so that their cost grows with the text, not with the vocabulary. The list may repeat a token, and is
    filled up with token 0: writing the same new score twice, or an unseen token's own score, changes nothing.
    """

    def __init__(self, vocab: int, device: torch.device):
        self.counts = torch.zeros(0, vocab, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(0, vocab, dtype=torch.bool, device=device)
        self.listed = torch.zeros(0, _COLUMNS, dtype=torch.int64, device=device)
        self._length = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []

    @property
    def used(self) -> int:
        return len(self._length) - len(self._free)

    def take(self) -> int:
        """A row without history."""
        if not self._free:
            held = len(self._length)
            more = max(held, 4)
            self.counts, self.prompt, self.listed = (_grow(t, more, 0) for t in (self.counts, self.prompt, self.listed))
            self._length = np.concatenate([self._length, np.zeros(more, dtype=np.int64)])
            self._free = list(range(held + more - 1, held - 1, -1))
        row = self._free.pop()
        for table in (self.counts, self.prompt, self.listed):
            table[row] = 0
        self._length[row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def to_prompt(self, row: int) -> None:
        """What was generated so far counts as prompt from now on."""
        self.prompt[row] |= self.counts[row] > 0
        self.counts[row] = 0

    def add_prompt(self, row: int, ids: np.ndarray) -> None:
        """*ids* ``[T]`` were read. Placeholders of media outside the vocabulary are no tokens that could repeat."""
        known = np.unique(ids[(ids >= 0) & (ids < self.prompt.shape[1])]).astype(np.int64)
        fresh = to_device(known, self.prompt.device)
        self.prompt[row, fresh] = True
        begin, end = self._length[row], self._length[row] + len(known)
        self._widen(int(end))
        self.listed[row, begin:end] = fresh
        self._length[row] = end

    def add(self, penalties: Penalties, ids: Tensor, complete: np.ndarray) -> None:
        """The step's rows generated *ids* (int64 ``[step rows]``); those that are not *complete* (bool) count for
        nothing: they write 0 more occurrences, and a list entry that the next token will overwrite."""
        done = complete[penalties.host_rows]
        columns = self._length[penalties.host_histories]
        self._widen(int(columns.max()) + 1)
        device = self.counts.device
        mine = ids[penalties.rows]
        self.listed.index_put_((penalties.histories, to_device(columns, device)), mine)
        amount = to_device(done.astype(np.int32), device)
        self.counts.index_put_((penalties.histories, mine), amount, accumulate=True)
        self._length[penalties.host_histories] += done

    def take_back(self, row: int, token: Tensor) -> None:
        """*token* (int64, no dimensions), the last that was added to *row*, was not generated after all."""
        self._length[row] -= 1
        self.counts[row].index_add_(0, token.reshape(1), self.counts.new_full((1,), -1))

    def penalize(self, scores: Tensor, penalties: Penalties) -> None:
        """Apply the penalties to *scores* (float32 ``[step rows, vocab]``) in place."""
        longest = int(self._length[penalties.host_histories].max())
        if longest == 0:
            return
        histories = penalties.histories.unsqueeze(1)
        ids = self.listed[penalties.histories, : _rounded(longest)]
        counts = self.counts[histories, ids]
        seen = self.prompt[histories, ids] | (counts > 0)
        where = (penalties.rows.unsqueeze(1), ids)
        edited = penalize_repetition(scores[where], seen, penalties.repetition)
        scores.index_put_(where, penalize_counts(edited, counts, penalties.frequency, penalties.presence))

    def _widen(self, columns: int) -> None:
        held = self.listed.shape[1]
        if columns > held:
            self.listed = _grow(self.listed, max(_rounded(columns) - held, held), 1)


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS


def _grow(table: Tensor, more: int, dim: int) -> Tensor:
    """*table* with *more* zeros along *dim*; an ordinary tensor, because it is written in and out of inference mode."""
    shape = list(table.shape)
    shape[dim] = more
    with torch.inference_mode(False):
        return torch.cat([table, table.new_zeros(shape)], dim=dim)
