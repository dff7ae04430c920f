"""What every kernel of :mod:`mstar.nn.ops.cuda_sampling` reads of a row: its parameters, its scores, their order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops.cuda_edits import GROUP, edited
from mstar.nn.sampling import Changes

__all__ = [
    "GREEDY",
    "INVERSE_TEMPERATURE",
    "MIN_P",
    "REGISTERS",
    "TOP_P",
    "best_of",
    "filters_of",
    "key_of",
    "launched",
    "least_by_min_p",
    "parameters",
    "score_of",
    "scores",
    "some_scores",
]

# The columns of the slots' parameters that are read.
INVERSE_TEMPERATURE, TOP_P, MIN_P, GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(6)


REGISTERS = 64
"""Of a thread, in kernels that read all logits: as many programs run at once as it takes to keep memory busy. What goes
to memory for want of them belongs to branches that few blocks take."""


@triton.jit
def parameters(slots, floats, row, columns: tl.constexpr):
    """Slot, inverse temperature, top-p, min-p and greedy of *row*. Columns: those of ``SlotTable``."""
    slot = tl.load(slots + row)
    line = floats + slot * columns
    scale, top_p, min_p = tl.load(line + INVERSE_TEMPERATURE), tl.load(line + TOP_P), tl.load(line + MIN_P)
    return slot, scale, top_p, min_p, tl.load(line + GREEDY) != 0


@triton.jit
def filters_of(top_ks, slot, top_p, min_p, greedy, vocab: tl.constexpr):
    """Top-k; whether a row filters by it, by top-p, and at all."""
    top_k = tl.load(top_ks + slot)
    by_count, by_weight = (top_k > 0) & (top_k < vocab) & (not greedy), (top_p < 1) & (not greedy)
    return top_k, by_count, by_weight, by_count | by_weight | ((min_p > 0) & (not greedy))


@triton.jit
def least_by_min_p(min_p, best):
    """The lowest score that min-p leaves beside the *best*; minus infinity without it."""
    return tl.where(min_p > 0, best + tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))


@triton.jit
def some_scores(
    line, group, inside, row, edits, scale, columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr
):
    """Scores of groups of eight neighbouring tokens, ``[n, 8]``, after edits and temperature, float32.

    :param line: the row's logits. :param group: ``[n]``. :param inside: which tokens there are; others get minus
        infinity. :param changed: whether *edits* are heeded, see :func:`mstar.nn.ops.cuda_edits.edited`.
    """
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32)
    if changed:
        x = edited(x, group, row, edits, columns, vocab)
    return x * scale


@triton.jit
def scores(
    logits, row, block_index, edits, scale,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, block: tl.constexpr, changed: tl.constexpr,
):  # fmt: skip
    """The scores of one block, ``[block]``, as :func:`some_scores` has them; minus infinity beyond the vocabulary."""
    group = block_index * (block // GROUP) + tl.arange(0, block // GROUP)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :] < vocab
    x = some_scores(logits + row * stride, group, inside, row, edits, scale, columns, vocab, changed)
    return tl.reshape(x, (block,))


@triton.jit
def best_of(tops, row, blocks: tl.constexpr, block_lanes: tl.constexpr):
    """The tops of *row*'s blocks, NaN as plus infinity, and the largest."""
    lane = tl.arange(0, block_lanes)
    top = tl.load(tops + row * blocks + lane, mask=lane < blocks, other=float("-inf"))
    top = tl.where(top != top, float("inf"), top)
    return top, tl.max(top, 0)


@triton.jit
def key_of(x):
    """int64 in the order of the float32 *x*, in 0…2**32-1; zeros of both signs have one key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000).to(tl.int64)


@triton.jit
def score_of(key):
    """The float32 of a key: the inverse of :func:`key_of`."""
    bits = key.to(tl.uint32)
    bits = tl.where(bits < 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return bits.to(tl.float32, bitcast=True)


def launched(
    logits: Tensor, slots: Tensor, floats: Tensor, changes: Changes | None
) -> tuple[tuple[Tensor, ...], tuple[int | bool, ...]]:
    """The arguments with which every kernel begins, and the constants with which these begin: columns, stride, vocab,
    changed."""
    # What is not read is any tensor whose place in memory makes no variant of a kernel.
    edits = (slots, slots, slots, logits, logits)
    if changes is not None:
        assert changes.flags is not None
        edits = (changes.which, changes.words, changes.histories, changes.marks, changes.flags)
    return (logits, slots, floats, *edits), (floats.stride(0), logits.stride(0), logits.shape[1], changes is not None)
