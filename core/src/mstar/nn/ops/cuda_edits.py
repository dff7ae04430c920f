"""Masks and penalties of logits as a Triton kernel: what :func:`mstar.nn.sampling.edit` defines.

Penalties change the few tokens that a row has seen, of a vocabulary of 150,000. So a row's history has a flag for every
:data:`~mstar.resources.sampler_history.GROUP` neighbouring tokens, of which the kernel reads all, and counts and logits
only where one is set: 20 kB a row instead of 1.8 MB. A masked row has the forbidden tokens written, and nothing is read
for it but the mask, a bit a token. Rows without either leave at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl

__all__ = ["edit"]

_COUNT = tl.constexpr((1 << 30) - 1)  # the bits of a token's mark that count; see TokenHistories
_GROUP = tl.constexpr(8)
REPETITION, FREQUENCY, PRESENCE = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["which", "words", "slots", "floats", "histories"])
def _edit(
    scores, which, words, slots, floats, histories, marks, flags,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, width: tl.constexpr, groups: tl.constexpr,
    block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    chosen, history = tl.load(which + row), tl.load(histories + row)
    if (chosen == 0) & (history == 0):
        return
    group = tl.program_id(1) * (block // _GROUP) + tl.arange(0, block // _GROUP)
    seen = tl.zeros((block // _GROUP,), tl.int32)
    if history != 0:
        seen = tl.load(flags + history * groups + group, mask=group < groups, other=0).to(tl.int32)
    any_seen = tl.max(seen, 0) != 0
    if (chosen == 0) & (not any_seen):
        return
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = at < vocab
    allowed = inside
    if chosen != 0:
        word = tl.load(words + (chosen - 1) * width + at // 32, mask=inside, other=0)
        allowed = inside & (((word >> (at % 32)) & 1) != 0)
        tl.store(scores + row * stride + at, float("-inf"), mask=inside & (allowed == 0))
    if any_seen:
        read = allowed & (seen[:, None] != 0)
        mark = tl.load(marks + history * vocab + at, mask=read, other=0)
        changed = mark != 0
        x = tl.load(scores + row * stride + at, mask=changed, other=0.0)
        line = floats + tl.load(slots + row) * columns
        factor = tl.load(line + REPETITION)
        frequency, presence = tl.load(line + FREQUENCY), tl.load(line + PRESENCE)
        count = (mark & _COUNT).to(tl.float32)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(scores + row * stride + at, x, mask=changed)


def edit(
    scores: Tensor,
    which: Tensor,
    words: Tensor,
    slots: Tensor,
    floats: Tensor,
    histories: Tensor,
    marks: Tensor,
    flags: Tensor,
) -> None:
    """:func:`mstar.nn.sampling.edit` in one kernel. Arguments as there, and:

    :param flags: uint8 ``[n, ceil(vocab / 8)]``: 0 where eight tokens of a line of *marks* are all 0; line 0 is
        all 0.
    """
    rows, vocab = scores.shape
    if not rows:
        return
    block = min(max(triton.next_power_of_2(vocab), 16), _BLOCK)
    _edit[(rows, -(-vocab // block))](
        scores, which, words, slots, floats, histories, marks, flags,
        floats.stride(0), scores.stride(0), vocab, words.shape[1], flags.shape[1], block, pdl.enabled(),
        num_warps=min(max(block // 512, 1), 8), maxnreg=64, **pdl.options(),
    )  # fmt: skip
