"""Sampling as Triton kernels: what :mod:`mstar.nn.sampling` defines, without a sort and without asking the device.

The vocabulary is cut into blocks, and a row's blocks are worked on at the same time. Every kernel's grid is (rows,
blocks), parameters are read on the device by slot, and no program looks at another row: a row's token is the same alone
and in any batch, and a captured graph holds nobody's parameters.

1. :func:`_summarise`: each block's largest score, where it is, and the sum of the exponentials relative to it.
2. With filters, the threshold of top-k and then of top-p, by digits of four bits. A float's bits, seen as an integer,
   are ordered like the floats, so the threshold is found exactly, digit by digit from the highest: a pass adds up, per
   block, what the sixteen next digits hold (:func:`_histogram`: the number of tokens for top-k, their weight for
   top-p), and the next pass picks the digit at which the sum from above reaches its target (:func:`_descend`). Four
   passes for logits of 16 bits, eight for float32; as many again for rows that use both. Rows that need none leave
   at once. The search is on the logits as they are: dividing by a temperature keeps their order.
   :func:`_filtered` then sums what is left of each block.
3. :func:`_choose`: the best token of greedy rows; for the others the block and the token in it where the cumulative
   sum passes the uniform number.

:func:`edit` changes logits before that, in a pass of its own that rows without edits leave at once.

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

__all__ = ["GREEDY", "INVERSE_TEMPERATURE", "MIN_P", "TOP_P", "Summary", "apply_filters", "edit", "sample", "summarise"]

# The columns of the slots' parameters that are read.
INVERSE_TEMPERATURE, TOP_P, MIN_P, GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(6)
REPETITION, FREQUENCY, PRESENCE = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
_COUNT = tl.constexpr((1 << 30) - 1)  # the bits of a token's mark that count; see TokenHistories

_BLOCK = 4096
# Where these begin depends on the number of rows, which shall not make a variant of a kernel.
_SMALL = ["slots", "floats", "top_ks", "uniforms", "tops", "sums", "places", "thresholds", "sums_filtered", "ids"]
_EACH = tl.constexpr(16)
_DIGITS = tl.constexpr(16)
_STATE = tl.constexpr(4)  # float64 a row and pass: digits so far, sum above them, target, top-k's threshold


@triton.jit
def _scores(logits, row, block_index, scale, stride: tl.constexpr, vocab: tl.constexpr, block: tl.constexpr):
    """Raw logits of one block, their scores after temperature (minus infinity beyond the vocabulary), and which are
    within it."""
    at = block_index * block + tl.arange(0, block)
    inside = at < vocab
    raw = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    return raw, raw.to(tl.float32) * scale, inside


@triton.jit
def _parameters(slots, floats, row, columns: tl.constexpr):
    """Slot, inverse temperature, top-p, min-p and greedy of *row*. Columns: those of ``SlotTable``."""
    slot = tl.load(slots + row)
    line = floats + slot * columns
    scale, top_p, min_p = tl.load(line + INVERSE_TEMPERATURE), tl.load(line + TOP_P), tl.load(line + MIN_P)
    return slot, scale, top_p, min_p, tl.load(line + GREEDY) != 0


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _summarise(
    logits, slots, floats, tops, sums, places,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    _, scale, _, _, _ = _parameters(slots, floats, row, columns)
    _, x, _ = _scores(logits, row, index, scale, stride, vocab, block)
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


@triton.jit(do_not_specialize_on_alignment=["which", "words", "slots", "floats", "histories"])
def _edit(
    scores, which, words, slots, floats, histories, marks,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    chosen, history = tl.load(which + row), tl.load(histories + row)
    if (chosen == 0) & (history == 0):
        return
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < vocab
    x = tl.load(scores + row * stride + at, mask=inside, other=0.0)
    if chosen != 0:
        word = tl.load(words + (chosen - 1) * width + at // 32, mask=inside, other=0)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
    if history != 0:
        line = floats + tl.load(slots + row) * columns
        factor = tl.load(line + REPETITION)
        frequency, presence = tl.load(line + FREQUENCY), tl.load(line + PRESENCE)
        mark = tl.load(marks + history * vocab + at, mask=inside, other=0)
        count = (mark & _COUNT).to(tl.float32)
        x = tl.where(mark != 0, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
        x = x - frequency * count - tl.where(count > 0, presence, 0.0)
    tl.store(scores + row * stride + at, x, mask=inside)


@triton.jit
def _best(tops, row, blocks: tl.constexpr, block_lanes: tl.constexpr):
    """The tops of *row*'s blocks, NaN as plus infinity, and the largest."""
    lane = tl.arange(0, block_lanes)
    top = tl.load(tops + row * blocks + lane, mask=lane < blocks, other=float("-inf"))
    top = tl.where(top != top, float("inf"), top)
    return top, tl.max(top, 0)


@triton.jit
def _key(raw):
    """Integers in the order of the floats: uint32, of which a float of 16 bits fills the lower half."""
    if raw.dtype.primitive_bitwidth == 16:
        bits = raw.to(tl.uint16, bitcast=True).to(tl.uint32)
        return tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
    else:
        bits = raw.to(tl.uint32, bitcast=True)
        return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _float(key, kind: tl.constexpr):
    """The float32 of a key (as float64) of *kind*: the inverse of :func:`_key`."""
    bits = key.to(tl.uint32)
    if kind.primitive_bitwidth == 16:
        bits = tl.where(bits < 0x8000, bits ^ 0xFFFF, bits ^ 0x8000).to(tl.uint16)
    else:
        bits = tl.where(bits < 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return bits.to(kind, bitcast=True).to(tl.float32)


@triton.jit
def _descend(
    parts, state, row, top_k, top_p, counting, first: tl.constexpr,
    vocab: tl.constexpr, blocks: tl.constexpr, block_lanes: tl.constexpr,
):  # fmt: skip
    """Append the digit that the last pass's *parts* show. Returns the state after it.

    The threshold is the least token of which those above it sum to less than the target.
    """
    digit = tl.arange(0, _DIGITS)
    lane = tl.arange(0, block_lanes)[:, None]
    found = tl.load(parts + (row * blocks + lane) * _DIGITS + digit[None, :], mask=lane < blocks, other=0)
    held = tl.sum(found.to(tl.float64), 0)
    above = tl.sum(tl.where(digit[None, :] > digit[:, None], held[None, :], 0.0), 1)
    line = state + row * _STATE
    kth = tl.load(line + 3)
    if first:
        prefix, base = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        wanted = tl.minimum(top_k, vocab).to(tl.float64)
        target = tl.where(counting, wanted, top_p.to(tl.float64) * tl.sum(held, 0))
    else:
        prefix, base, target = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    chosen = tl.minimum(tl.sum((base + above >= target).to(tl.int32), 0), _DIGITS - 1)
    base += tl.sum(tl.where(digit == chosen, above, 0.0), 0)
    return prefix * _DIGITS + chosen, base, target, kth


@triton.jit
def _by_digit(own, weight, first: tl.constexpr, step: tl.constexpr):
    """Sums over the second axis of *weight* where *own* is 0…15, ``[threads, 2, 2, 2, 2]``: the digit's bits."""
    if step == 16:
        return tl.sum(tl.where(own == first, weight, 0.0), 1)
    else:
        even = _by_digit(own, weight, first, 2 * step)
        return tl.join(even, _by_digit(own, weight, first + step, 2 * step))


@triton.jit(do_not_specialize=["shift"], do_not_specialize_on_alignment=_SMALL)
def _histogram(
    logits, slots, floats, top_ks, tops, parts_before, state_before, parts, state,
    shift, second: tl.constexpr, level: tl.constexpr,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr,
    block_lanes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """What the sixteen digits hold that are *shift* bits up, for the first threshold that a row needs, or its *second*.

    :param level: 0 for the highest digit, 1 for the next, 2 for all others.
    """
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    slot, scale, top_p, _, greedy = _parameters(slots, floats, row, columns)
    top_k = tl.load(top_ks + slot)
    by_count, by_weight = (top_k > 0) & (not greedy), (top_p < 1) & (not greedy)
    if second:
        counting = top_k < 0  # never
        active = by_count & by_weight
    else:
        counting = by_count
        active = by_count | by_weight
    if not active:
        return
    prefix, base, target = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    kth = tl.full((), 0.0, tl.float64)
    if level > 0:
        prefix, base, target, kth = _descend(
            parts_before, state_before, row, top_k, top_p, counting, level == 1, vocab, blocks, block_lanes
        )
    elif second:
        kth = _descend(parts_before, state_before, row, top_k, top_p, counting, False, vocab, blocks, block_lanes)[0]
    if index == 0:
        line = state + row * _STATE
        tl.store(line, prefix)
        tl.store(line + 1, base)
        tl.store(line + 2, target)
        tl.store(line + 3, kth)
    _, best = _best(tops, row, blocks, block_lanes)
    least = float("-inf")
    if second:
        least = _float(kth, logits.dtype.element_ty) * scale
    # Some neighbouring tokens a thread: it adds them up by itself, then all threads are added up once.
    at = index * block + tl.arange(0, block // _EACH)[:, None] * _EACH + tl.arange(0, _EACH)[None, :]
    inside = at < vocab
    raw = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    x = raw.to(tl.float32) * scale
    own = (_key(raw) >> shift) - (prefix * _DIGITS).to(tl.uint32)  # beyond 15: another prefix
    weight = tl.where(counting, 1.0, tl.exp(x - best))
    weight = tl.where(inside & (x >= least), weight, 0.0)
    held = tl.reshape(tl.sum(_by_digit(own, weight, 0, 1), 0), (_DIGITS,))
    tl.store(parts + (row * blocks + index) * _DIGITS + tl.arange(0, _DIGITS), held)


@triton.jit(do_not_specialize_on_alignment=_SMALL)
def _filtered(
    logits, slots, floats, top_ks, tops, parts_first, state_first, parts_second, state_second, thresholds, sums,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr,
    block_lanes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """The thresholds of rows with filters, and what their blocks still weigh relative to the row's best."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    slot, scale, top_p, min_p, greedy = _parameters(slots, floats, row, columns)
    top_k = tl.load(top_ks + slot)
    by_count, by_weight = top_k > 0, top_p < 1
    if greedy | (not (by_count | by_weight | (min_p > 0))):
        return
    _, best = _best(tops, row, blocks, block_lanes)
    threshold = tl.where(min_p > 0, best + tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))
    if by_count | by_weight:
        key = _descend(parts_first, state_first, row, top_k, top_p, by_count, False, vocab, blocks, block_lanes)[0]
        found = _float(key, logits.dtype.element_ty) * scale
        threshold = tl.maximum(threshold, tl.minimum(found, best))
    if by_count & by_weight:
        key = _descend(parts_second, state_second, row, top_k, top_p, False, False, vocab, blocks, block_lanes)[0]
        found = _float(key, logits.dtype.element_ty) * scale
        threshold = tl.maximum(threshold, tl.minimum(found, best))
    _, x, _ = _scores(logits, row, index, scale, stride, vocab, block)
    weights = tl.where(x >= threshold, tl.exp(x - best), 0.0)
    tl.store(sums + row * blocks + index, tl.sum(weights, 0))
    if index == 0:
        tl.store(thresholds + row * blocks, threshold)


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
    logits, slots, floats, top_ks, uniforms, tops, sums, places, thresholds, sums_filtered, ids,
    filters: tl.constexpr,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr,
    block_lanes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    slot, scale, top_p, min_p, greedy = _parameters(slots, floats, row, columns)
    lane = tl.arange(0, block_lanes)
    top, best = _best(tops, row, blocks, block_lanes)
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
        if (tl.load(top_ks + slot) > 0) | (top_p < 1) | (min_p > 0):
            threshold = tl.load(thresholds + row * blocks)
            held = tl.load(sums_filtered + row * blocks + lane, mask=lane < blocks, other=0)
    index, rest = _find(held.to(tl.float64), tl.load(uniforms + row))
    _, x, _ = _scores(logits, row, index, scale, stride, vocab, block)
    weights = tl.where(x >= threshold, tl.exp(x - best), 0.0)
    within, _ = _find(weights.to(tl.float64), tl.minimum(tl.maximum(rest, 0.0), 1.0))
    tl.store(ids + row, (index * block + within).to(tl.int64))


class Summary(NamedTuple):
    """What is known of each block, float32 ``[rows, blocks]`` (*places* int32), and how the kernels are launched.

    :param filtered: and *thresholds* ``[rows, blocks]``, of which the first of each row counts: what the filters leave,
        in rows that have any.
    """

    tops: Tensor
    sums: Tensor
    filtered: Tensor
    thresholds: Tensor
    places: Tensor
    sizes: tuple[int, ...]
    lanes: int
    warps: int


def edit(
    scores: Tensor, which: Tensor, words: Tensor, slots: Tensor, floats: Tensor, histories: Tensor, marks: Tensor
) -> None:
    """:func:`mstar.nn.sampling.edit` in one kernel, of which a row without mask and penalties costs next to nothing."""
    rows, vocab = scores.shape
    if not rows:
        return
    block = min(max(triton.next_power_of_2(vocab), 16), _BLOCK)
    _edit[(rows, -(-vocab // block))](
        scores, which, words, slots, floats, histories, marks,
        floats.stride(0), scores.stride(0), vocab, words.shape[1], block, pdl.enabled(),
        num_warps=min(max(block // 512, 1), 8), **pdl.options(),
    )  # fmt: skip


def summarise(logits: Tensor, slots: Tensor, floats: Tensor) -> Summary:
    """Look at every logit once. Arguments as in :func:`sample`."""
    rows, vocab = logits.shape
    block = min(max(triton.next_power_of_2(vocab), 16), _BLOCK)
    blocks = -(-vocab // block)
    tops, sums, filtered, thresholds = logits.new_empty((4, rows, blocks), dtype=torch.float32).unbind(0)
    places = logits.new_empty((rows, blocks), dtype=torch.int32)
    sizes = (floats.stride(0), logits.stride(0), vocab, blocks, block)
    lanes, warps = triton.next_power_of_2(blocks), min(max(block // 512, 1), 8)
    _summarise[(rows, blocks)](
        logits, slots, floats, tops, sums, places, *sizes, pdl.enabled(), num_warps=warps, **pdl.options()
    )
    return Summary(tops, sums, filtered, thresholds, places, sizes, lanes, warps)


def apply_filters(logits: Tensor, slots: Tensor, floats: Tensor, top_k: Tensor, known: Summary) -> None:
    """Fill in *known*'s ``thresholds`` and ``filtered`` for the rows that use top-k, top-p or min-p."""
    rows, blocks = known.tops.shape
    levels = logits.element_size() * 2
    parts = logits.new_empty((2 * levels, rows, blocks, 16), dtype=torch.float32).unbind(0)
    state = logits.new_empty((2 * levels, rows, 4), dtype=torch.float64).unbind(0)
    for number in range(2 * levels):
        before, level = max(number - 1, 0), number % levels
        _histogram[(rows, blocks)](
            logits, slots, floats, top_k, known.tops, parts[before], state[before], parts[number], state[number],
            4 * (levels - 1 - level), number >= levels, min(level, 2), *known.sizes, known.lanes, pdl.enabled(),
            num_warps=8, **pdl.options(),
        )  # fmt: skip
    first, last = levels - 1, 2 * levels - 1
    _filtered[(rows, blocks)](
        logits, slots, floats, top_k, known.tops, parts[first], state[first], parts[last], state[last],
        known.thresholds, known.filtered, *known.sizes, known.lanes, pdl.enabled(),
        num_warps=known.warps, **pdl.options(),
    )  # fmt: skip


def sample(logits: Tensor, slots: Tensor, floats: Tensor, top_k: Tensor, uniforms: Tensor, filters: bool) -> Tensor:
    """One token per row: int64 ``[rows]``, −1 for a row that holds a NaN or +inf, or nothing else than −inf.

    Everything is read on the device when the kernels run, so that a captured graph replays with what the tensors then
    hold; *filters* alone is fixed by a capture.

    :param logits: float32, bfloat16 or float16 ``[rows, vocab]``, not changed.
    :param slots: int64 ``[rows]``: each row's line in the parameters of all slots: *floats*, float32 with the columns
        of ``SlotTable``, and *top_k* int64.
    :param uniforms: float64 ``[rows]`` in [0, 1), one number each; greedy rows read none.
    :param filters: whether top-k, top-p and min-p are heeded. ``True`` is right for any rows and costs nine to
        seventeen short kernels more; ``False`` where no row uses them.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows = logits.shape[0]
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return ids
    known = summarise(logits, slots, floats)
    if filters:
        apply_filters(logits, slots, floats, top_k, known)
    _choose[(rows,)](
        logits, slots, floats, top_k, uniforms, known.tops, known.sums, known.places, known.thresholds, known.filtered,
        ids, filters, *known.sizes, known.lanes, pdl.enabled(),
        num_warps=known.warps, **pdl.options(),
    )  # fmt: skip
    return ids
