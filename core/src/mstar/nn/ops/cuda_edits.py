"""Masks and penalties of scores as they are read: what :func:`mstar.nn.sampling.edit` defines, in Triton.

No pass of its own changes the logits: each kernel that reads some of them changes these in its registers. Penalties
concern the few tokens that a row has seen, of a vocabulary of 150,000, so its history has a flag for every eight
neighbouring tokens. All flags are read, and counts only where one is set: 20 kB a row instead of 628. A mask is a bit
a token. Rows without either read nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["GROUP", "edited"]

GROUP = tl.constexpr(8)
"""That of :mod:`mstar.resources.sampler_history`."""

REPETITION, FREQUENCY, PRESENCE = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_COUNT = tl.constexpr((1 << 30) - 1)  # the bits of a token's mark that count; see TokenHistories


@triton.jit
def edited(x, group, row, edits, columns: tl.constexpr, vocab: tl.constexpr):
    """The scores *x* of whole groups of tokens, float32 ``[n, 8]``, after masks and penalties of *row*.

    :param group: ``[n]``: which groups they are; those beyond the vocabulary are left as they are.
    :param edits: (slots, floats, which, words, histories, marks, flags), as in :class:`mstar.nn.sampling.Changes`.
    """
    slots, floats, which, words, histories, marks, flags = edits
    chosen, history = tl.load(which + row), tl.load(histories + row)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    groups: tl.constexpr = (vocab + GROUP - 1) // GROUP
    width: tl.constexpr = (vocab + 31) // 32
    if history != 0:
        seen = tl.load(flags + history * groups + group, mask=group < groups, other=0)
        if tl.max(seen.to(tl.int32), 0) != 0:
            mark = tl.load(marks + history * vocab + at, mask=(at < vocab) & (seen != 0)[:, None], other=0)
            line = floats + tl.load(slots + row) * columns
            factor = tl.load(line + REPETITION)
            frequency, presence = tl.load(line + FREQUENCY), tl.load(line + PRESENCE)
            count = (mark & _COUNT).to(tl.float32)
            x = tl.where(mark != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
            x = x - frequency * count - tl.where(count > 0, presence, 0.0)
    if chosen != 0:
        word = tl.load(words + (chosen - 1) * width + at // 32, mask=at < vocab, other=-1)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
    return x
