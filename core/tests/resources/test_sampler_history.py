"""What slots have seen, in a table of fixed size as a GPU has it: no mark without its group's flag."""

from __future__ import annotations

import numpy as np
import torch

from mstar.resources.sampler_history import GROUP, TokenHistories, flags_of
from mstar.resources.sampler_rows import Penalties

VOCAB = 101  # the last group is short


def said(table: TokenHistories, lines: list[int], ids: list[int], complete: list[bool] | None = None) -> None:
    histories, strength = np.array(lines, dtype=np.int64), torch.ones(len(lines))
    rows = np.arange(len(lines))
    penalties = Penalties(
        torch.from_numpy(rows), rows, torch.from_numpy(histories), histories, strength, strength, strength
    )
    table.add(penalties, torch.tensor(ids), np.array(complete or [True] * len(lines)))


def flagged(table: TokenHistories) -> torch.Tensor:
    """Which tokens a kernel would read, bool ``[rows, vocab]``."""
    assert table.flags is not None
    return (table.flags != 0).repeat_interleave(GROUP, 1)[:, :VOCAB]


def test_every_mark_has_a_flag() -> None:
    table = TokenHistories(VOCAB, torch.device("cpu"), rows=3)
    first, second = table.take(), table.take()
    table.add_prompt(first, np.array([0, 9, 100, 500, -3]))
    said(table, [first, second], [55, 100], complete=[True, False])
    said(table, [second], [23])
    table.take_back(second, torch.tensor(23))
    table.to_prompt(first)
    assert table.marks[first].nonzero().flatten().tolist() == [0, 9, 55, 100]
    assert flagged(table)[table.marks != 0].all()
    assert int(flagged(table)[first].sum()) == 3 * GROUP + VOCAB % GROUP
    assert not flagged(table)[0].any()
    table.give_back(first)
    again = table.take()
    assert again == first
    assert not table.marks[again].any()
    assert not flagged(table)[again].any()


def test_flags_move_with_the_marks() -> None:
    there, here = (TokenHistories(VOCAB, torch.device("cpu"), rows=2) for _ in range(2))
    line, other = there.take(), here.take()
    there.add_prompt(line, np.array([3, 4, 77]))
    said(there, [line], [90])
    here.put(other, there.seen(line))
    assert torch.equal(here.marks[other], there.marks[line])
    assert flagged(here)[here.marks != 0].all()
    assert int(flagged(here).sum()) == 3 * GROUP


def test_a_table_that_grows_has_a_list_instead() -> None:
    table = TokenHistories(VOCAB, torch.device("cpu"))
    assert table.flags is None
    assert flags_of(VOCAB) == 13
    line = table.take()
    said(table, [line], [5])
    assert table.nbytes > 4 * VOCAB
