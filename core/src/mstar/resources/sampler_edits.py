"""What a step of the sampler changes in its logits, as tensors that the host fills when the step is planned.

Two forms. *By row*, on a device and in captured graphs: a line for every row of the step, so that a graph which was
captured with some rows' edits can be repeated with others'. *Sparse*, on the CPU: only the rows concerned, since there
a pass over the vocabulary is dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mstar.nn import sampling
from mstar.resources.sampler_history import TokenHistories
from mstar.resources.sampler_rows import Penalties, RowParams, words_of
from mstar.resources.staging import Stage

__all__ = ["BIAS_ROOMS", "Edits", "Masks", "bias_room"]

BIAS_ROOMS = (256, 4096, 65536)
"""How many entries of ``logit_bias`` a captured step's rows may have together: a graph for each size that comes."""

Masks = Sequence[tuple[int, npt.NDArray[np.int32]]]
"""Rows of which some tokens are impossible, and the words that say which are not."""


def bias_room(rows: RowParams) -> int | None:
    """The size of *rows*' bias in a captured step; ``None``: it is too large for one."""
    if rows.bias is None:
        return 0
    return next((room for room in BIAS_ROOMS if room >= len(rows.bias[0])), None)


class Edits(NamedTuple):
    """One step's edits.

    :param bias: places in the logits read as one line, and what is added there.
    :param which: by row: 0, or 1 + the row's line in *words*. Sparse: the rows that *words* are of.
    :param histories: by row: the line of each row's token history, 0 for none.
    :param penalties: sparse: the rows with penalties.
    """

    bias: tuple[Tensor, Tensor] | None
    which: Tensor
    words: Tensor
    histories: Tensor | None
    penalties: Penalties | None

    @classmethod
    def by_row(cls, stage: Stage, name: str, rows: RowParams, masks: Masks, room: int | None, vocab: int) -> Edits:
        """*room*: length of the bias on a lane; ``None``: as it is."""
        count = len(rows.slots)
        which, histories = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for line, (row, _) in enumerate(masks):
            which[row] = line + 1
        if rows.penalties is not None:
            histories[rows.penalties.host_rows] = rows.penalties.host_histories
        return cls(
            _bias_of(stage, name, rows, room),
            stage.put(f"{name}.masked", which),
            stage.put(f"{name}.masks", _lines(masks, vocab, least=1), room=count),
            stage.put(f"{name}.histories", histories),
            None,
        )

    @classmethod
    def sparse(cls, stage: Stage, name: str, rows: RowParams, masks: Masks, vocab: int) -> Edits:
        masked = np.array([row for row, _ in masks], np.int64)
        which, words = stage.put(f"{name}.masked", masked), stage.put(f"{name}.masks", _lines(masks, vocab, least=0))
        return cls(_bias_of(stage, name, rows, None), which, words, None, rows.penalties)

    def changes(self, histories: TokenHistories) -> sampling.Changes | None:
        """Masks and penalties, if they are by row."""
        if self.histories is None:
            return None
        return sampling.Changes(self.which, self.words, self.histories, histories.marks, histories.flags)

    def apply(self, scores: Tensor, slots: Tensor, floats: Tensor, histories: TokenHistories) -> None:
        """Change *scores* (float32 ``[rows, vocab]``) in place. *slots* and *floats* are those of
        :func:`mstar.nn.sampling.edit`."""
        if self.bias is not None:
            sampling.add_bias(scores, *self.bias)
        changes = self.changes(histories)
        if changes is not None:
            sampling.edit(scores, slots, floats, changes)
            return
        if len(self.which):
            sampling.allow_only(scores, self.which, self.words)
        if self.penalties is not None:
            histories.penalize(scores, self.penalties)


def _bias_of(stage: Stage, name: str, rows: RowParams, room: int | None) -> tuple[Tensor, Tensor] | None:
    """Padded to *room* with nothing, added to the first entry."""
    if rows.bias is None and not room:
        return None
    places, values = rows.bias if rows.bias is not None else (np.zeros(0, np.int64), np.zeros(0, np.float32))
    if room is not None:
        more = room - len(places)
        places, values = np.pad(places, (0, more)), np.pad(values, (0, more))
    return stage.put(f"{name}.bias_places", places), stage.put(f"{name}.bias", values)


def _lines(masks: Masks, vocab: int, least: int) -> npt.NDArray[np.int32]:
    """The words of *masks*, int32 ``[n, words]``; at least so many lines."""
    lines = np.full((max(len(masks), least), words_of(vocab)), -1, np.int32)
    for line, (_, words) in enumerate(masks):
        lines[line] = words
    return lines
