"""Between which scores a row's threshold lies, from a sample: the first step of :mod:`mstar.nn.ops.cuda_filters`.

The sample is 4,096 tokens, spread over the vocabulary in pieces of eight. The bracket reaches four standard deviations
to either side of what they say. For top-p it is the weight of the tokens that are dropped which is estimated: these are
many and light, so a sample knows it well, while the few heavy tokens that may hold all the rest are in the sample or
not by chance. What all tokens weigh is known. A bracket that is wrong costs time and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.nn.ops import pdl
from mstar.nn.ops.cuda_edits import GROUP
from mstar.nn.ops.cuda_sampling_rows import (
    best_of,
    filters_of,
    key_of,
    least_by_min_p,
    parameters,
    score_of,
    some_scores,
)

__all__ = ["BOUNDS", "bracket"]

BOUNDS = tl.constexpr(4)
"""float64 a row: the bracket's low end (plus infinity: the row holds no numbers), its high end, best, total."""

_SMALL = ["slots", "floats", "which", "words", "histories", "top_ks", "tops", "sums", "bounds", "found"]
_PIECES = tl.constexpr(512)  # of eight neighbours, which are read together
_SAMPLE = tl.constexpr(4096)
_REACH = tl.constexpr(128.0)  # nats below the best in which a bracket begins
_STEPS = tl.constexpr(13)  # halvings: to 1 in 8,192 of the sample's range
_SURE = tl.constexpr(4.0)  # standard deviations
_UNSEEN = tl.constexpr(10.0)  # so many tokens may be there of which the sample has none: e**-10
_LEAST = tl.constexpr(1 - 10.0 / 4096)  # so much of what the sample has is there if all of the sample is


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def bracket(
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
    least = least_by_min_p(min_p, best)
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
    line = bounds + row * BOUNDS
    tl.store(line, tl.where(numbers, low, float("inf")).to(tl.float64))
    tl.store(line + 1, high.to(tl.float64))
    tl.store(line + 2, best.to(tl.float64))
    tl.store(line + 3, total)
    tl.store(found + row, 0)


@triton.jit
def _estimate(x, best, total, top_k, top_p, by_count, vocab: tl.constexpr):
    """A bracket from the sample *x*, by halving the range of scores for both of its ends.

    By count: the tokens from a score on, which shall be *top_k*. By weight: what the tokens below it weigh, which shall
    be 1 − *top_p* of the total.
    """
    amount = tl.where(by_count, 1.0, tl.exp(x - best))
    share = tl.full((), _SAMPLE / vocab, tl.float64)
    goal = tl.where(by_count, top_k.to(tl.float64), (1 - top_p.to(tl.float64)) * total) * share
    goal = goal.to(tl.float32)
    least = tl.min(tl.min(tl.where(x > float("-inf"), x, best), 1), 0)
    bottom = tl.maximum(least, best - _REACH)
    top = best + tl.maximum(tl.abs(best) * 1e-6, 1e-30)
    # From a score on, or below it: both as "more than".
    turned = tl.where(by_count, x, -x)
    # Of each end, a score that is known to be right (or stands for infinity), and one beyond it that is not.
    low, beyond_low, high, beyond_high = bottom, top, top, bottom
    for _ in range(_STEPS):
        middle, other = (low + beyond_low) * 0.5, (high + beyond_high) * 0.5
        found, spread, found_high, spread_high = _sampled(
            turned, amount, _turned(middle, by_count), _turned(other, by_count)
        )
        heaviest = tl.exp(tl.minimum(middle - best, 0.0))
        right = tl.where(by_count, found * _LEAST - spread >= goal, found + spread + _UNSEEN * heaviest <= goal)
        low, beyond_low = tl.where(right, middle, low), tl.where(right, beyond_low, middle)
        right = tl.where(by_count, found_high + spread_high + _UNSEEN <= goal, found_high * _LEAST - spread_high > goal)
        high, beyond_high = tl.where(right, other, high), tl.where(right, beyond_high, other)
    return tl.where(low == bottom, float("-inf"), low), tl.where(high == top, float("inf"), high)


@triton.jit
def _turned(score, by_count):
    """What "from *score* on" is more than, or "below *score*" with its sign turned."""
    return tl.where(by_count, score_of(key_of(score) - 1), -score)


@triton.jit
def _sampled(turned, amount, score, other):
    """The sum of the amounts of what is more than *score*, and how far off it may be; the same for *other*. All sums
    are made at once: the threads wait for each other once."""
    chosen = tl.where(turned > score, amount, 0.0)
    besides = tl.where(turned > other, amount, 0.0)
    sums = tl.join(tl.sum(chosen, 1), tl.sum(besides, 1))
    squares = tl.join(tl.sum(chosen * chosen, 1), tl.sum(besides * besides, 1))
    sums, squares = tl.split(tl.sum(tl.join(sums, squares), 0))
    spreads = _SURE * tl.sqrt(tl.maximum(squares - sums * sums / _SAMPLE, 0.0))
    found, found_other = tl.split(sums)
    spread, spread_other = tl.split(spreads)
    return found, spread, found_other, spread_other
