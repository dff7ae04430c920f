"""The threshold of top-k, top-p and min-p in few passes over the logits, as Triton kernels.

The threshold is the least score that is kept (:mod:`mstar.nn.sampling`): of which those above it are fewer than *k*, or
weigh less than *p* of all. A sort would find it, and so would a search digit by digit that reads all logits every time.
Here a sample says where to look, and what is found is exact:

1. :mod:`mstar.nn.ops.cuda_brackets`: a sample tells between which two scores the threshold lies, all but certainly.
2. :func:`_collect`, the one pass over all logits: what lies above the bracket is counted and weighed, and what lies
   within goes to a buffer: a few hundred tokens of a peaked row, some thousands of a flat one.
3. :func:`_settle`, a program a row: was the bracket right (fewer than *k* above it, *k* or more with what is in the
   buffer; likewise by weight)? Then the threshold is in the buffer, and is found there by halving: a float's bits, seen
   as an integer, are ordered like the floats. If the bracket was wrong, or held more than fits (thousands of equal
   scores), the same search reads the row's logits instead. Then what is left of each block is weighed.

The sample decides how long it takes, never what comes out. Weights in the buffer are whole shares of 2**40, so that
their sums do not depend on the order in which blocks were stored there; what lies above it is summed block by block.
Rows that use no filter leave every kernel at once, and no program looks at another row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.cuda_brackets import BOUNDS, bracket
from mstar.nn.ops.cuda_edits import GROUP
from mstar.nn.ops.cuda_sampling_rows import (
    REGISTERS,
    filters_of,
    key_of,
    launched,
    least_by_min_p,
    parameters,
    score_of,
    scores,
    some_scores,
)
from mstar.nn.sampling import Changes

__all__ = ["Filtered", "apply_filters"]

ROOM = tl.constexpr(16384)
"""Tokens of a row that the buffer holds."""

_SMALL = [
    "slots", "floats", "which", "words", "histories", "top_ks", "tops", "bounds", "found", "lines", "kept",
    "thresholds", "weights",
]  # fmt: skip
_SHARE = tl.constexpr(1099511627776.0)  # 2**40
_LINE = tl.constexpr(3)
"""int32 a block: how many are above the bracket, how many within it, where these begin in the buffer."""


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _collect(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    tops, bounds, found, lines, kept, weights,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Weigh and count what is above the bracket, keep what is within. Blocks that are all below it are not read."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)[3]
    if not filtered:
        return
    low, high = tl.load(bounds + row * BOUNDS).to(tl.float32), tl.load(bounds + row * BOUNDS + 1).to(tl.float32)
    if low == float("inf"):
        return
    line = lines + (row * blocks + index) * _LINE
    if tl.load(tops + row * blocks + index) < low:
        tl.store(weights + row * blocks + index, 0.0)
        tl.store(line, 0)
        tl.store(line + 1, 0)
        return
    edits = (slots, floats, which, words, histories, marks, flags)
    x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
    weight, begin = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    if high < float("inf"):
        best = tl.load(bounds + row * BOUNDS + 2).to(tl.float32)
        weight = tl.sum(tl.where(x >= high, tl.exp(x - best), 0.0), 0)
    between = (x >= low) & (x < high) & (x > float("-inf"))
    counts = tl.sum(tl.where(x >= high, 1 << 16, between.to(tl.int32)), 0)  # two numbers in one sum
    above, number = counts >> 16, counts & 0xFFFF
    if number > 0:
        begin = tl.atomic_add(found + row, number, sem="relaxed")
        place = begin + tl.cumsum(between.to(tl.int32), 0) - 1
        tl.store(kept + row * ROOM + place, x, mask=between & (place < ROOM))
    tl.store(weights + row * blocks + index, weight)
    tl.store(line, above)
    tl.store(line + 1, number)
    tl.store(line + 2, begin)


@triton.jit
def _some(
    source, start, count, scale,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, threads: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """Scores of so many neighbours a thread from *start*, ``[threads, each]``; minus infinity from *count* on."""
    line, row, edits = source
    group = start // GROUP + tl.arange(0, threads * each // GROUP)
    inside = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :] < count
    x = some_scores(line, group, inside, row, edits, scale, columns, vocab, changed)
    return tl.reshape(x, (threads, each))


@triton.jit
def _ends(x, amount):
    """Of scores above minus infinity whose *amount* counts: its sum, the smallest key, and the largest."""
    key = key_of(x)
    there = amount > 0
    smallest = tl.min(tl.min(tl.where(there, key, 1 << 32), 1), 0)
    return tl.sum(tl.sum(amount, 1), 0), smallest, tl.max(tl.max(tl.where(there, key, -1), 1), 0)


@triton.jit
def _amounts(
    source, start, count, scale, best, by_count, least,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, threads: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """Some scores and their amounts, 0 below *least*: whole shares of 2**40, int64; by count 1 for each."""
    x = _some(source, start, count, scale, columns, vocab, changed, threads, each)
    shares = tl.where(by_count, 1, (tl.exp(x - best) * _SHARE).to(tl.int64))
    return x, tl.where((x >= least) & (x > float("-inf")), shares, 0)


@triton.jit
def _thresholds(
    source, count, scale, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely, first, second,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, each: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """The threshold of top-k and then top-p among the scores of *source*, and whether it is right.

    Both are the largest score from which on there is as much as they want, and are found by halving the range of keys.

    :param above: how many tokens there are beside and above them, and *heavier* their shares. :param surely:
        whether all that there is below them is out, or nothing is there. :param first: and *second*, keys to begin
        with; −1: the middle. :param whole: all of them stay in registers; otherwise they are read anew each time.
    """
    threads: tl.constexpr = 256
    step: tl.constexpr = threads * each
    threshold, right = tl.full((), float("-inf"), tl.float32), tl.full((), True, tl.int1)
    for turn in range(2):
        counting = turn == 0
        if tl.where(counting, by_count, by_weight):
            x, amounts = _amounts(
                source, 0, count, scale, best, counting, threshold, columns, vocab, changed, threads, each
            )
            amount, low, high = _ends(x, amounts)
            if not whole:
                for start in tl.range(step, count, step):
                    some, shares = _amounts(
                        source, start, count, scale, best, counting, threshold, columns, vocab, changed, threads, each
                    )
                    more, smallest, largest = _ends(some, shares)
                    amount, low, high = amount + more, tl.minimum(low, smallest), tl.maximum(high, largest)
            base = tl.where(counting, above, heavier)
            of = tl.where(by_count, amount.to(tl.float64), total * _SHARE)  # top-p of what top-k has left
            target = tl.maximum(tl.where(counting, top_k, (top_p.to(tl.float64) * of).to(tl.int64)), 1)
            if base >= target:
                right = tl.full((), False, tl.int1)
            elif base + amount < target:
                right = right & surely  # all of them are kept
            else:
                probe, other = first, second
                while low < high:
                    middle = tl.where(probe < 0, (low + high + 1) >> 1, tl.minimum(tl.maximum(probe, low + 1), high))
                    probe, other = other, tl.full((), -1, tl.int64)
                    score = score_of(middle)
                    reached = base
                    if whole:
                        reached += tl.sum(tl.sum(tl.where(x >= score, amounts, 0), 1), 0)
                    else:
                        held = tl.zeros((threads,), tl.int64)
                        for start in tl.range(0, count, step):
                            some, shares = _amounts(
                                source, start, count, scale, best, counting, threshold,
                                columns, vocab, changed, threads, each,
                            )  # fmt: skip
                            held += tl.sum(tl.where(some >= score, shares, 0), 1)
                        reached += tl.sum(held, 0)
                    low, high = tl.where(reached >= target, middle, low), tl.where(reached >= target, high, middle - 1)
                threshold = score_of(low)
    return threshold, right


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _settle(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    bounds, found, lines, kept, weights, thresholds, until,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr, block_lanes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Each row's threshold, and what it leaves of each block. In *found*: −1 when the row was looked for among all
    logits, and the bracket says nothing."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    top_k, by_count, by_weight, filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)
    if not filtered:
        return
    bound = bounds + row * BOUNDS
    low, best, total = tl.load(bound).to(tl.float32), tl.load(bound + 2).to(tl.float32), tl.load(bound + 3)
    if low == float("inf"):
        return
    least = least_by_min_p(min_p, best)
    threshold = least
    if by_count | by_weight:
        lane = tl.arange(0, block_lanes)
        there = lane < blocks
        line = lines + (row * blocks + lane) * _LINE
        above = tl.sum(tl.load(line, mask=there, other=0).to(tl.int64), 0)
        weight = tl.load(weights + row * blocks + lane, mask=there, other=0)
        heavier = (tl.sum(weight.to(tl.float64), 0) * _SHARE).to(tl.int64)
        number = tl.load(found + row)
        edits = (slots, floats, which, words, histories, marks, flags)
        mine, middle = (kept + row * ROOM, row, edits), tl.full((), -1, tl.int64)
        surely = (low == float("-inf")) | (low <= least)
        right = tl.full((), False, tl.int1)
        if number <= 2048:
            threshold, right = _thresholds(
                mine, number, 1.0, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely,
                middle, middle, columns, vocab, False, 8, True,
            )  # fmt: skip
        elif number <= 4096:
            threshold, right = _thresholds(
                mine, number, 1.0, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely,
                middle, middle, columns, vocab, False, 16, True,
            )  # fmt: skip
        elif number <= 8192:
            threshold, right = _thresholds(
                mine, number, 1.0, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely,
                middle, middle, columns, vocab, False, 32, True,
            )  # fmt: skip
        elif number <= ROOM:
            threshold, right = _thresholds(
                mine, number, 1.0, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely,
                middle, middle, columns, vocab, False, 16, False,
            )  # fmt: skip
        if right:
            threshold = tl.maximum(tl.minimum(threshold, best), least)
            # Running sums over the buffer, in which a block's tokens stand side by side.
            sums, before = until + row * ROOM, tl.full((), 0, tl.int64)
            for start in tl.range(0, number, 2048):
                at = start + tl.arange(0, 2048)
                x = tl.load(kept + row * ROOM + at, mask=at < number, other=float("-inf"))
                share = tl.where(x >= threshold, (tl.exp(x - best) * _SHARE).to(tl.int64), 0)
                tl.store(sums + at, tl.cumsum(share, 0) + before, mask=at < number)
                before += tl.sum(share, 0)
            tl.debug_barrier()  # other threads read them
            held, begin = tl.load(line + 1, mask=there, other=0), tl.load(line + 2, mask=there, other=0)
            last = tl.load(sums + begin + held - 1, mask=held > 0, other=0)
            last -= tl.load(sums + begin - 1, mask=(held > 0) & (begin > 0), other=0)
            tl.store(weights + row * blocks + lane, weight + (last.to(tl.float64) / _SHARE).to(tl.float32), mask=there)
        else:
            nothing = tl.full((), 0, tl.int64)
            source, high = (logits + row * stride, row, edits), tl.load(bound + 1).to(tl.float32)
            threshold, right = _thresholds(
                source, vocab, scale, best, total, top_k, top_p, by_count, by_weight, nothing, nothing, True,
                key_of(low), key_of(high), columns, vocab, changed, 16, False,
            )  # fmt: skip
            threshold = tl.maximum(tl.minimum(threshold, best), least)
            for index in range(blocks):
                x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
                weighed = tl.sum(tl.where(x >= threshold, tl.exp(x - best), 0.0), 0)
                tl.store(weights + row * blocks + index, weighed)
            tl.store(found + row, -1)
    tl.store(thresholds + row, threshold)


class Filtered(NamedTuple):
    """What is left of rows with filters; nothing is said of others.

    :param thresholds: float32 ``[rows]``: the least score after temperature that is kept.
    :param weights: float32 ``[rows, blocks]``: what is kept of each block, relative to the row's best.
    :param found: int32 ``[rows]``: how many tokens were in the bracket; −1: it was not used, all logits were searched.
    """

    thresholds: Tensor
    weights: Tensor
    found: Tensor


def apply_filters(
    logits: Tensor,
    slots: Tensor,
    floats: Tensor,
    top_k: Tensor,
    tops: Tensor,
    sums: Tensor,
    block: int,
    warps: int,
    changes: Changes | None = None,
) -> Filtered:
    """Threshold and weights of the rows that use top-k, top-p or min-p.

    :param tops: float32 ``[rows, blocks]``: the largest score of each *block*, and in *sums* the sum of the
        exponentials relative to it. :param warps: of kernels that work on a block.
    """
    rows, blocks = tops.shape
    row, sizes = launched(logits, slots, floats, changes)
    row, sizes = (*row, top_k), (*sizes, blocks)
    lanes, early, options = triton.next_power_of_2(blocks), pdl.enabled(), pdl.options()
    bounds = logits.new_empty((rows, 4), dtype=torch.float64)
    kept = logits.new_empty((rows, ROOM.value), dtype=torch.float32)
    weights, thresholds = torch.empty_like(tops), tops.new_empty((rows,))
    found = logits.new_empty((rows,), dtype=torch.int32)
    lines = logits.new_empty((rows, blocks, 3), dtype=torch.int32)
    bracket[(rows,)](*row, tops, sums, bounds, found, *sizes, lanes, early, num_warps=4, **options)
    collected = (bounds, found, lines, kept, weights)
    _collect[(rows, blocks)](
        *row, tops, *collected, *sizes, block, early, num_warps=warps, maxnreg=REGISTERS, **options
    )
    until = logits.new_empty((rows, ROOM.value), dtype=torch.int64)
    _settle[(rows,)](
        *row, *collected, thresholds, until, *sizes, block, lanes, early, num_warps=8, maxnreg=128, **options
    )
    return Filtered(thresholds, weights, found)
