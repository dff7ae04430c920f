"""The threshold of top-k, top-p and min-p in few passes over the logits, as Triton kernels.

The threshold is the least score that is kept (:mod:`mstar.nn.sampling`): of which those above it are fewer than *k*, or
weigh less than *p* of all. A sort would find it, and so would a search digit by digit that reads all logits every time.
Here a sample says where to look, and what is found is exact:

1. :func:`_bracket`: 4,096 tokens spread over the vocabulary tell between which two scores the threshold lies, all but
   certainly (four standard deviations of what such a sample may be off). What top-p drops is what is estimated, not
   what it keeps: the dropped tokens are many and light, so a sample knows their weight well, while the few heavy tokens
   that may hold all the rest are in the sample or not by chance. The total is known (:func:`_summarise`).
2. :func:`_collect`, the one pass over all logits: what lies above the bracket is counted and weighed, and what lies
   within goes to a buffer: a few hundred tokens of a peaked row, some thousands of a flat one.
3. :func:`_settle`, a program a row: was the bracket right (fewer than *k* above it, *k* or more with what is in the
   buffer; likewise by weight)? Then the threshold is in the buffer, and is found there by digits of four bits: a
   float's bits, seen as an integer, are ordered like the floats. If the bracket was wrong, or held more than fits
   (thousands of equal scores), the same search reads the row's logits instead.
4. :func:`_weigh`: what is left of each block.

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
from mstar.nn.ops.cuda_edits import GROUP
from mstar.nn.ops.cuda_sampling_rows import (
    REGISTERS,
    best_of,
    filters_of,
    key_of,
    launched,
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
    "slots", "floats", "which", "words", "histories", "top_ks", "tops", "sums", "bounds", "found", "lines", "kept",
    "thresholds", "weights",
]  # fmt: skip
_PIECES = tl.constexpr(512)  # of eight neighbours, which are read together
_SAMPLE = tl.constexpr(4096)
_STEPS = tl.constexpr(24)  # halvings of 2**32 keys: to a part in 2**15 of a score
_SURE = tl.constexpr(4.0)  # standard deviations
_UNSEEN = tl.constexpr(10.0)  # so many tokens may be there of which the sample has none: e**-10
_LEAST = tl.constexpr(1 - 10.0 / 4096)  # so much of what the sample has is there if all of the sample is
_SHARE = tl.constexpr(1099511627776.0)  # 2**40
_DIGITS = tl.constexpr(16)
_BOUNDS = tl.constexpr(4)
"""float64 a row: the bracket's low end (plus infinity: the row holds no numbers), its high end, best, total."""
_LINE = tl.constexpr(3)
"""int32 a block: how many are above the bracket, how many within it, where these begin in the buffer."""


@triton.jit
def _least_by_min_p(min_p, best):
    return tl.where(min_p > 0, best + tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _bracket(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    tops, sums, bounds, found,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block_lanes: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Between which scores each row's threshold lies: from the low end to below the high end."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    top_k, by_count, by_weight, filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)
    if not filtered:
        return
    lane = tl.arange(0, block_lanes)
    top, best = best_of(tops, row, blocks, block_lanes)
    held = tl.load(sums + row * blocks + lane, mask=lane < blocks, other=0) * tl.exp(top - best)
    total = tl.sum(held.to(tl.float64), 0)
    numbers = (best > float("-inf")) & (best < float("inf"))
    least = _least_by_min_p(min_p, best)
    low, high = least, least
    if by_count | by_weight:
        low, high = tl.full((), float("-inf"), tl.float32), tl.full((), float("inf"), tl.float32)
        if (vocab > _SAMPLE) & numbers:
            edits = (slots, floats, which, words, histories, marks, flags)
            group = tl.arange(0, _PIECES) * (vocab // GROUP) // _PIECES
            inside = (group < vocab // GROUP)[:, None]  # all of them
            x = some_scores(logits + row * stride, group, inside, row, edits, scale, columns, vocab, changed)
            low, high = _estimate(x, best, total, top_k, top_p, by_count, vocab)
        if by_count & by_weight:
            high = float("inf")  # what top-p is a share of is known when top-k's threshold is
        else:
            high = tl.maximum(high, least)
            low = tl.maximum(low, least)
    line = bounds + row * _BOUNDS
    tl.store(line, tl.where(numbers, low, float("inf")).to(tl.float64))
    tl.store(line + 1, high.to(tl.float64))
    tl.store(line + 2, best.to(tl.float64))
    tl.store(line + 3, total)
    tl.store(found + row, 0)


@triton.jit
def _estimate(x, best, total, top_k, top_p, by_count, vocab: tl.constexpr):
    """A bracket from the sample *x*, by halving the range of keys for both of its ends.

    By count: the tokens from a score on, which shall be *top_k*. By weight: what the tokens below it weigh, which shall
    be 1 − *top_p* of the total.
    """
    amount = tl.where(by_count, 1.0, tl.exp(x - best))
    share = tl.full((), _SAMPLE / vocab, tl.float64)
    goal = tl.where(by_count, top_k.to(tl.float64), (1 - top_p.to(tl.float64)) * total) * share
    goal = goal.to(tl.float32)
    end = key_of(best) + 1
    # Of each end, a key that is known to be right (or stands for infinity), and one beyond it that is not.
    low, beyond_low = tl.full((), -1, tl.int64), end
    high, beyond_high = end, tl.full((), -1, tl.int64)
    for _ in range(_STEPS):
        middle, other = (low + beyond_low) >> 1, (high + beyond_high) >> 1
        score = score_of(tl.maximum(middle, 0))
        found, spread, found_high, spread_high = _sampled(x, amount, score, score_of(tl.maximum(other, 0)), by_count)
        heaviest = tl.exp(tl.minimum(score - best, 0.0))
        right = tl.where(by_count, found * _LEAST - spread >= goal, found + spread + _UNSEEN * heaviest <= goal)
        low, beyond_low = tl.where(right, middle, low), tl.where(right, beyond_low, middle)
        right = tl.where(by_count, found_high + spread_high + _UNSEEN <= goal, found_high * _LEAST - spread_high > goal)
        high, beyond_high = tl.where(right, other, high), tl.where(right, beyond_high, other)
    lowest = tl.where(low < 0, float("-inf"), score_of(tl.maximum(low, 0)))
    highest = tl.where(high >= end, float("inf"), score_of(tl.maximum(high, 0)))
    # A NaN is the key of no score: nothing lies below it.
    return tl.where(lowest == lowest, lowest, float("-inf")), tl.where(highest == highest, highest, float("inf"))


@triton.jit
def _sampled(x, amount, score, other, by_count):
    """The sum of the sample's amounts from *score* on (by count) or below it, and how far off it may be; the same for
    *other*. All sums are made at once: the threads wait for each other once."""
    chosen = tl.where((x >= score) == by_count, amount, 0.0)
    besides = tl.where((x >= other) == by_count, amount, 0.0)
    sums = tl.join(tl.sum(chosen, 1), tl.sum(besides, 1))
    squares = tl.join(tl.sum(chosen * chosen, 1), tl.sum(besides * besides, 1))
    sums, squares = tl.split(tl.sum(tl.join(sums, squares), 0))
    spreads = _SURE * tl.sqrt(tl.maximum(squares - sums * sums / _SAMPLE, 0.0))
    found, found_other = tl.split(sums)
    spread, spread_other = tl.split(spreads)
    return found, spread, found_other, spread_other


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _collect(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    bounds, found, lines, kept, weights,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Weigh and count what is above the bracket, keep what is within."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)[3]
    if not filtered:
        return
    low, high = tl.load(bounds + row * _BOUNDS).to(tl.float32), tl.load(bounds + row * _BOUNDS + 1).to(tl.float32)
    if low == float("inf"):
        return
    edits = (slots, floats, which, words, histories, marks, flags)
    x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
    weight, above, begin = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if high < float("inf"):
        best = tl.load(bounds + row * _BOUNDS + 2).to(tl.float32)
        weight = tl.sum(tl.where(x >= high, tl.exp(x - best), 0.0), 0)
        above = tl.sum((x >= high).to(tl.int32), 0)
    between = (x >= low) & (x < high) & (x > float("-inf"))
    number = tl.sum(between.to(tl.int32), 0)
    if number > 0:
        begin = tl.atomic_add(found + row, number, sem="relaxed")
        place = begin + tl.cumsum(between.to(tl.int32), 0) - 1
        tl.store(kept + row * ROOM + place, x, mask=between & (place < ROOM))
    tl.store(weights + row * blocks + index, weight)
    line = lines + (row * blocks + index) * _LINE
    tl.store(line, above)
    tl.store(line + 1, number)
    tl.store(line + 2, begin)


@triton.jit
def _shares(x, best, by_count):
    """Whole shares of 2**40, int64; by count: 1 for each."""
    return tl.where(by_count, 1, (tl.exp(x - best) * _SHARE).to(tl.int64))


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
def _ends(
    source, count, scale, best, by_count, least,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, threads: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """The sum of the amounts from *least* on, the smallest key that is there, and the largest."""
    amount = tl.zeros((threads,), tl.int64)
    smallest, largest = tl.full((threads,), 1 << 32, tl.int64), tl.full((threads,), -1, tl.int64)
    for start in tl.range(0, count, threads * each):
        x = _some(source, start, count, scale, columns, vocab, changed, threads, each)
        counts = (x >= least) & (x > float("-inf"))
        amount += tl.sum(tl.where(counts, _shares(x, best, by_count), 0), 1)
        key = key_of(x)
        smallest = tl.minimum(smallest, tl.min(tl.where(counts, key, 1 << 32), 1))
        largest = tl.maximum(largest, tl.max(tl.where(counts, key, -1), 1))
    return tl.sum(amount, 0), tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _by_digit(own, amount, first: tl.constexpr, step: tl.constexpr):
    """Sums over the second axis of *amount* where *own* is 0…15, ``[threads, 2, 2, 2, 2]``: the digit's bits."""
    if step == 16:
        return tl.sum(tl.where(own == first, amount, 0), 1)
    else:
        even = _by_digit(own, amount, first, 2 * step)
        return tl.join(even, _by_digit(own, amount, first + step, 2 * step))


@triton.jit
def _search(
    source, count, scale, best, by_count, least, smallest, largest, base, target,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, threads: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """The key of the least score of which the amounts above it, and *base*, are less than *target*.

    :param smallest: the search is from this key on to *largest*, which is not smaller.
    """
    digit = tl.arange(0, _DIGITS)
    prefix, span = smallest, largest - smallest
    shift = tl.full((), 0, tl.int32)
    while (span >> shift) >= _DIGITS:
        shift += 4
    while shift >= 0:
        amounts = tl.zeros((threads, 2, 2, 2, 2), tl.int64)
        for start in tl.range(0, count, threads * each):
            x = _some(source, start, count, scale, columns, vocab, changed, threads, each)
            own = (key_of(x) - prefix) >> shift  # beyond 0…15: settled before
            amounts += _by_digit(own, tl.where(x >= least, _shares(x, best, by_count), 0), 0, 1)
        held = tl.reshape(tl.sum(amounts, 0), (_DIGITS,))
        above = base + tl.sum(tl.where(digit[None, :] > digit[:, None], held[None, :], 0), 1)
        chosen = tl.minimum(tl.sum((above >= target).to(tl.int32), 0), _DIGITS - 1)
        base = tl.sum(tl.where(digit == chosen, above, 0), 0)
        prefix += chosen.to(tl.int64) << shift
        shift -= 4
    return prefix


@triton.jit
def _thresholds(
    source, count, scale, best, total, top_k, top_p, by_count, by_weight, above, heavier, surely,
    columns: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, threads: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """The threshold of top-k and then top-p among the scores of *source*, and whether it is right.

    :param above: how many tokens there are beside and above them, and *heavier* their shares. :param surely:
        whether all that there is below them is out, or nothing is there.
    """
    threshold, right = tl.full((), float("-inf"), tl.float32), tl.full((), True, tl.int1)
    for turn in range(2):
        counting = turn == 0
        if tl.where(counting, by_count, by_weight):
            amount, smallest, largest = _ends(
                source, count, scale, best, counting, threshold, columns, vocab, changed, threads, each
            )
            base = tl.where(counting, above, heavier)
            whole = tl.where(by_count, amount.to(tl.float64), total * _SHARE)  # top-p of what top-k has left
            target = tl.where(counting, top_k, (top_p.to(tl.float64) * whole).to(tl.int64))
            target = tl.maximum(target, 1)
            if base >= target:
                right = tl.full((), False, tl.int1)
            elif base + amount < target:
                right = right & surely  # all of them are kept
            else:
                key = _search(
                    source,
                    count,
                    scale,
                    best,
                    counting,
                    threshold,
                    smallest,
                    largest,
                    base,
                    target,
                    columns,
                    vocab,
                    changed,
                    threads,
                    each,
                )
                threshold = score_of(key)
    return threshold, right


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _settle(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    bounds, found, lines, kept, weights, thresholds,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block_lanes: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Each row's threshold. In *found*: −1 when it was looked for among all logits, and the bracket says nothing."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    top_k, by_count, by_weight, filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)
    if not filtered:
        return
    bound = bounds + row * _BOUNDS
    low, best, total = tl.load(bound).to(tl.float32), tl.load(bound + 2).to(tl.float32), tl.load(bound + 3)
    if low == float("inf"):
        return
    least = _least_by_min_p(min_p, best)
    threshold = least
    if by_count | by_weight:
        lane = tl.arange(0, block_lanes)
        there = lane < blocks
        above = tl.sum(tl.load(lines + (row * blocks + lane) * _LINE, mask=there, other=0).to(tl.int64), 0)
        heavier = tl.load(weights + row * blocks + lane, mask=there, other=0).to(tl.float64)
        number = tl.load(found + row)
        right = number <= ROOM
        edits = (slots, floats, which, words, histories, marks, flags)
        if right:
            surely = (low == float("-inf")) | (low <= least)
            threshold, right = _thresholds(
                (kept + row * ROOM, row, edits), number, 1.0, best, total, top_k, top_p, by_count, by_weight,
                above, (tl.sum(heavier, 0) * _SHARE).to(tl.int64), surely, columns, vocab, False, 256, 4,
            )  # fmt: skip
        if not right:
            nothing = tl.full((), 0, tl.int64)
            threshold, _ = _thresholds(
                (logits + row * stride, row, edits), vocab, scale, best, total, top_k, top_p, by_count, by_weight,
                nothing, nothing, True, columns, vocab, changed, 256, 16,
            )  # fmt: skip
            tl.store(found + row, -1)
        threshold = tl.maximum(tl.minimum(threshold, best), least)
    tl.store(thresholds + row, threshold)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _weigh(
    logits, slots, floats, which, words, histories, marks, flags, top_ks,
    bounds, found, lines, kept, weights, thresholds,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Add to each block's weight what its tokens in the buffer weigh that are kept."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    filtered = filters_of(top_ks, slot, top_p, min_p, greedy, vocab)[3]
    if not filtered:
        return
    low, best = tl.load(bounds + row * _BOUNDS).to(tl.float32), tl.load(bounds + row * _BOUNDS + 2).to(tl.float32)
    if low == float("inf"):
        return
    threshold, place = tl.load(thresholds + row), row * blocks + index
    if tl.load(found + row) < 0:
        edits = (slots, floats, which, words, histories, marks, flags)
        x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
        tl.store(weights + place, tl.sum(tl.where(x >= threshold, tl.exp(x - best), 0.0), 0))
        return
    number, begin = tl.load(lines + place * _LINE + 1), tl.load(lines + place * _LINE + 2)
    if number == 0:
        return
    weight = tl.load(weights + place)
    for start in tl.range(0, number, 256):
        at = start + tl.arange(0, 256)
        x = tl.load(kept + row * ROOM + begin + at, mask=at < number, other=float("-inf"))
        weight += tl.sum(tl.where(x >= threshold, tl.exp(x - best), 0.0), 0)
    tl.store(weights + place, weight)


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
    _bracket[(rows,)](*row, tops, sums, bounds, found, *sizes, lanes, early, num_warps=8, **options)
    collected = (bounds, found, lines, kept, weights)
    _collect[(rows, blocks)](*row, *collected, *sizes, block, early, num_warps=warps, maxnreg=REGISTERS, **options)
    _settle[(rows,)](*row, *collected, thresholds, *sizes, lanes, early, num_warps=8, maxnreg=128, **options)
    _weigh[(rows, blocks)](
        *row, *collected, thresholds, *sizes, block, early, num_warps=min(warps, 4), maxnreg=REGISTERS, **options
    )
    return Filtered(thresholds, weights, found)
