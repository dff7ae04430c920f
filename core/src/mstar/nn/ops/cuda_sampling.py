"""Sampling as Triton kernels: what :mod:`mstar.nn.sampling` defines, without a sort and without asking the device.

The vocabulary is cut into blocks, and a row's blocks are worked on at the same time. Most kernels' grid is (rows,
blocks), parameters are read on the device by slot, and no program looks at another row: a row's token is the same alone
and in any batch, and a captured graph holds nobody's parameters.

1. :func:`_summarise`: each block's largest score, where it is, and the sum of the exponentials relative to it.
2. With filters, :mod:`mstar.nn.ops.cuda_filters`: the threshold of top-k, top-p and min-p, and what it leaves of each
   block, in one more pass over the logits.
3. :func:`_choose`: the best token of greedy rows; for the others the block and the token in it where the cumulative
   sum passes the uniform number.

Masks and penalties change what each of them reads (:mod:`mstar.nn.ops.cuda_edits`).

Sums within a block are float32, as the reference's are; across blocks float64. The draw itself runs over integers:
shares of 2**52, whose sums are exact in any order, so that a token of weight 0 cannot be drawn by rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.cuda_filters import apply_filters
from mstar.nn.ops.cuda_sampling_rows import REGISTERS, best_of, filters_of, launched, parameters, scores
from mstar.nn.sampling import Changes

__all__ = ["Summary", "sample", "summarise"]

_BLOCK = 4096
# Where these begin depends on the number of rows, which shall not make a variant of a kernel.
_SMALL = [
    "slots", "floats", "which", "words", "histories", "top_ks", "uniforms", "tops", "sums", "places", "thresholds",
    "sums_filtered", "ids",
]  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _summarise(
    logits, slots, floats, which, words, histories, marks, flags, tops, sums, places,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    _, scale, _, _, _ = parameters(slots, floats, row, columns)
    edits = (slots, floats, which, words, histories, marks, flags)
    x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
    wrong = tl.max((x != x).to(tl.int32), 0) != 0
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    place = tl.min(tl.where(x == top, tl.arange(0, block), block), 0)  # the first of equals
    # Infinities give no NaN here: a block of minus infinity weighs nothing, and plus infinity is marked by its top.
    finite = (top > float("-inf")) & (top < float("inf"))
    weights = tl.exp(x - tl.where(finite, top, 0.0))
    tl.store(tops + row * blocks + index, tl.where(wrong, float("nan"), top))
    tl.store(sums + row * blocks + index, tl.where(finite, tl.sum(weights, 0), 0.0))
    tl.store(places + row * blocks + index, index * block + place)


@triton.jit
def _find(weights, uniform):
    """Where the cumulative sum of *weights* (float64) passes *uniform* of it, and how far into that entry it does.

    Entries are whole shares of 2**52, so that sums are exact: the entry found has a weight, and the rest is in [0, 1).
    """
    shares = (weights / tl.sum(weights, 0) * 4503599627370496.0).to(tl.int64)
    total = tl.sum(shares, 0)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    until = tl.cumsum(shares, 0)
    place = tl.sum((until <= target).to(tl.int32), 0)
    lane = tl.arange(0, weights.shape[0])
    share = tl.sum(tl.where(lane == place, shares, 0), 0)
    before = tl.sum(tl.where(lane == place, until - shares, 0), 0)
    # Between two whole shares the rest of the uniform number decides.
    return place, (uniform * total.to(tl.float64) - before.to(tl.float64)) / share.to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _choose(
    logits, slots, floats, which, words, histories, marks, flags,
    top_ks, uniforms, tops, sums, places, thresholds, sums_filtered, ids,
    filters: tl.constexpr,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, blocks: tl.constexpr,
    block: tl.constexpr, block_lanes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    slot, scale, top_p, min_p, greedy = parameters(slots, floats, row, columns)
    lane = tl.arange(0, block_lanes)
    top, best = best_of(tops, row, blocks, block_lanes)
    if (best == float("inf")) | (best == float("-inf")):
        tl.store(ids + row, tl.full((), -1, tl.int64))
        return
    if greedy:
        first = tl.min(tl.where(top == best, lane, block_lanes), 0)
        tl.store(ids + row, tl.load(places + row * blocks + first).to(tl.int64))
        return
    threshold = tl.full((), float("-inf"), tl.float32)
    held = tl.load(sums + row * blocks + lane, mask=lane < blocks, other=0) * tl.exp(top - best)
    if filters:  # noqa: SIM102 - the outer one is decided when the kernel is compiled
        if filters_of(top_ks, slot, top_p, min_p, greedy, vocab)[3]:
            threshold = tl.load(thresholds + row)
            held = tl.load(sums_filtered + row * blocks + lane, mask=lane < blocks, other=0)
    index, rest = _find(held.to(tl.float64), tl.load(uniforms + row))
    edits = (slots, floats, which, words, histories, marks, flags)
    x = scores(logits, row, index, edits, scale, columns, stride, vocab, block, changed)
    weights = tl.where(x >= threshold, tl.exp(x - best), 0.0)
    within, _ = _find(weights.to(tl.float64), tl.minimum(tl.maximum(rest, 0.0), 1.0))
    tl.store(ids + row, (index * block + within).to(tl.int64))


class Summary(NamedTuple):
    """What is known of each block, float32 ``[rows, blocks]`` (*places* int32), and how the kernels are launched."""

    tops: Tensor
    sums: Tensor
    places: Tensor
    block: int
    warps: int


def summarise(logits: Tensor, slots: Tensor, floats: Tensor, changes: Changes | None = None) -> Summary:
    """Look at every logit once. Arguments as in :func:`sample`."""
    rows, vocab = logits.shape
    block = min(max(triton.next_power_of_2(vocab), 16), _BLOCK)
    blocks = -(-vocab // block)
    tops, sums = logits.new_empty((2, rows, blocks), dtype=torch.float32).unbind(0)
    places = logits.new_empty((rows, blocks), dtype=torch.int32)
    warps = min(max(block // 512, 1), 8)
    row, sizes = launched(logits, slots, floats, changes)
    _summarise[(rows, blocks)](
        *row, tops, sums, places, *sizes, blocks, block, pdl.enabled(),
        num_warps=warps, maxnreg=REGISTERS, **pdl.options(),
    )  # fmt: skip
    return Summary(tops, sums, places, block, warps)


def sample(
    logits: Tensor,
    slots: Tensor,
    floats: Tensor,
    top_k: Tensor,
    uniforms: Tensor,
    filters: bool,
    changes: Changes | None = None,
) -> Tensor:
    """One token per row: int64 ``[rows]``, −1 for a row that holds a NaN or +inf, or nothing else than −inf.

    Everything is read on the device when the kernels run, so that a captured graph replays with what the tensors then
    hold; *filters* alone, and whether there are *changes*, is fixed by a capture.

    :param logits: float32, bfloat16 or float16 ``[rows, vocab]``, not changed.
    :param slots: int64 ``[rows]``: each row's line in the parameters of all slots: *floats*, float32 with the columns
        of ``SlotTable``, and *top_k* int64.
    :param uniforms: float64 ``[rows]`` in [0, 1), one number each; greedy rows read none.
    :param filters: whether top-k, top-p and min-p are heeded. ``True`` is right for any rows and costs four kernels
        more, of which one reads all logits of the rows that use them; ``False`` where no row does.
    :param changes: masks and penalties, applied in float32 to what is read of the logits.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = logits.shape[0]
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    known = summarise(logits, slots, floats, changes)
    blocks = known.tops.shape[1]
    thresholds, weights = known.tops, known.sums  # without filters they are not read
    if filters:
        thresholds, weights, _ = apply_filters(
            logits, slots, floats, top_k, known.tops, known.sums, known.block, known.warps, changes
        )
    row, sizes = launched(logits, slots, floats, changes)
    _choose[(rows,)](
        *row, top_k, uniforms, known.tops, known.sums, known.places, thresholds, weights, ids, filters,
        *sizes, blocks, known.block, triton.next_power_of_2(blocks), pdl.enabled(),
        num_warps=known.warps, **pdl.options(),
    )  # fmt: skip
    return ids
