"""What every kernel of :mod:`mstar.nn.ops.cuda_sampling` reads of a row: its parameters, its scores, their order."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "GREEDY",
    "INVERSE_TEMPERATURE",
    "MIN_P",
    "TOP_P",
    "best_of",
    "filters_of",
    "key_of",
    "parameters",
    "score_of",
    "scores",
]

# The columns of the slots' parameters that are read.
INVERSE_TEMPERATURE, TOP_P, MIN_P, GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(6)


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
def scores(logits, row, block_index, scale, stride: tl.constexpr, vocab: tl.constexpr, block: tl.constexpr):
    """The scores of one block after temperature, float32; minus infinity beyond the vocabulary."""
    at = block_index * block + tl.arange(0, block)
    return tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32) * scale


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
