"""Attention over pages whose results do not depend on the rest of the step (batch invariance), as one Triton kernel.

A query's result follows from the query, its position and the keys and values up to it, bit for bit: whichever other
rows the step has, however its prompt is cut, whether it decodes or is one of many queries. For that

- there is one compiled kernel for prompts, chunks and decoding, with tiles of one shape;
- keys are taken in blocks, and blocks in pieces of :data:`PIECE` tokens, that begin at absolute positions of the
  context, never at a place that depends on the step;
- pieces are put together one after the other. Who computes them is free: one program all of a tile's, or several
  programs, whose last puts together what they left. Both run the same operations (:func:`_join`, whose only sum of
  products is an explicit fused one, so that no compiler can round it in two ways).

A block that a query does not see changes nothing in its sums, exactly: its weights are 0, and what was summed is
multiplied by 1. So queries may share a tile whatever their positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.cuda_attention import _launch, _logits

__all__ = ["FIELDS", "LINES", "PIECE", "Scratch", "attend", "takes"]

PIECE = 512
"""Tokens of a context that one program sums up before they are put together with others."""
LINES = 16
"""Queries × query heads of one key head that a program takes: the tensor cores' smallest tile, and so the most query
heads of a key head."""
FIELDS = 5
"""int32 of one tile: its first query among the step's, its queries, where its pages begin, the position of its first
query in its context, tokens of the context. A tile without queries is skipped."""
_SIZES = (64, 128, 256)
_TYPES = (torch.bfloat16, torch.float16)
_LOG2E = math.log2(math.e)


@triton.jit
def _join(top, total, mixed, next_top, next_total, next_mixed):
    """Sums of exponentials relative to their tops, put together. Minus infinity: there is nothing in them."""
    higher = tl.maximum(top, next_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    taken = tl.exp2(next_top - base)
    total = tl.fma(total, kept, next_total * taken)
    mixed = tl.fma(mixed, tl.broadcast_to(kept[:, None], mixed.shape), next_mixed * taken[:, None])
    return higher, total, mixed


@triton.jit(do_not_specialize=["most_pieces", "lines"], do_not_specialize_on_alignment=["tiles", "indices"])
def _attend(
    q, keys, values, tiles, indices, out, shares, sums, counters, most_pieces, lines,
    stride: tl.constexpr, group: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, page: tl.constexpr,
    scale: tl.constexpr, softcap: tl.constexpr, window: tl.constexpr, causal: tl.constexpr,
    fields: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, piece: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program takes a tile's queries, for one key head, over every so manieth piece of their context.

    *window*: tokens that a query sees, itself included; 0 for all. *lines*: of a tile, as many as have a place in
    *shares*.
    """
    number, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width: tl.constexpr = kv_heads * size
    each: tl.constexpr = piece // block
    pdl.begin(early)
    record = tiles + number * fields
    query, count, pages = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    start, end = tl.load(record + 3), tl.load(record + 4)
    if count == 0:
        return
    if causal:
        last = start + count - 1
    else:
        last = end - 1
    if window > 0:
        low = tl.maximum(start - window + 1, 0)
    else:
        low = start * 0
    first = low // piece
    pieces = last // piece + 1 - first
    active = tl.minimum(tl.num_programs(1), pieces)
    if part >= active:
        return
    line = tl.arange(0, tile)
    at = tl.arange(0, size)[None, :]
    real = (line < count * group)[:, None]
    if causal:
        limit = start + line // group
    else:
        limit = last + line * 0
    place = (query + line // group).to(tl.int64)
    x = tl.load(q + place[:, None] * stride + (head * group + line % group)[:, None] * size + at, mask=real, other=0)
    top = tl.full((tile,), float("-inf"), tl.float32)
    total = tl.zeros((tile,), tl.float32)
    mixed = tl.zeros((tile, size), tl.float32)
    cell = number * kv_heads + head
    mine = cell.to(tl.int64) * most_pieces * lines + line
    for index in range(first + part, first + pieces, active):
        next_top = tl.full((tile,), float("-inf"), tl.float32)
        next_total = tl.zeros((tile,), tl.float32)
        next_mixed = tl.zeros((tile, size), tl.float32)
        begin = tl.maximum(index * each, low // block)
        for block_index in tl.range(begin, tl.minimum((index + 1) * each, last // block + 1)):
            token = block_index * block + tl.arange(0, block)
            there = (token >= low) & (token <= last)
            found = tl.load(indices + pages + token // page, mask=there, other=0).to(tl.int64)
            key = ((found * page + token % page) * width + head * size)[:, None] + at
            k = tl.load(keys + key, mask=there[:, None], other=0)
            v = tl.load(values + key, mask=there[:, None], other=0)
            seen = there[None, :] & (token[None, :] <= limit[:, None])
            if window > 0:
                seen = seen & (token[None, :] > limit[:, None] - window)
            logits = _logits(tl.dot(x, tl.trans(k)), scale, softcap)
            logits = tl.where(seen, logits, float("-inf"))
            higher = tl.maximum(next_top, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            kept = tl.exp2(next_top - base)
            weights = tl.exp2(logits - base[:, None])
            next_total = next_total * kept + tl.sum(weights, 1)
            next_mixed = tl.dot(weights.to(v.dtype), v, next_mixed * kept[:, None])
            next_top = higher
        if active == 1:
            top, total, mixed = _join(top, total, mixed, next_top, next_total, next_mixed)
        else:
            to = mine + (index - first) * lines
            tl.store(sums + 2 * to, next_top, mask=line < lines)
            tl.store(sums + 2 * to + 1, next_total, mask=line < lines)
            tl.store(shares + to[:, None] * size + at, next_mixed, mask=(line < lines)[:, None])
    target = out + place[:, None] * (group * width) + (head * group + line % group)[:, None] * size + at
    if active == 1:
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
        return
    tl.debug_barrier()  # all threads have stored before one of them tells of it
    if tl.atomic_add(counters + cell, 1, sem="acq_rel", scope="gpu") != active - 1:
        return
    tl.store(counters + cell, 0)  # as the next launch must find it
    for index in range(0, pieces):
        of = mine + index * lines
        known = line < lines
        next_top = tl.load(sums + 2 * of, mask=known, other=float("-inf"), cache_modifier=".cg")
        next_total = tl.load(sums + 2 * of + 1, mask=known, other=0, cache_modifier=".cg")
        next_mixed = tl.load(shares + of[:, None] * size + at, mask=known[:, None], other=0, cache_modifier=".cg")
        top, total, mixed = _join(top, total, mixed, next_top, next_total, next_mixed)
    tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


class Scratch(NamedTuple):
    """What programs leave for each other. Kernels of one stream share it.

    :param counters: int32, of each tile and key head how many programs are done; 0 between launches.
    :param parts: most programs that share a tile's context; with 1 the tensors are empty.
    :param pieces: most of a context. :param lines: of a tile that are kept.
    """

    shares: Tensor
    sums: Tensor
    counters: Tensor
    parts: int = 1
    pieces: int = 1
    lines: int = LINES


def takes(dtype: torch.dtype, size: int, group: int) -> str | None:
    """``None``, or why there is no kernel for heads of *size* in *dtype*, *group* of them to a key head."""
    if dtype not in _TYPES:
        return f"it has no kernel for {dtype}, only for bfloat16 and float16"
    if size not in _SIZES:
        return f"it has no kernel for head_dim {size}, only for 64, 128 and 256"
    return None if group <= LINES else f"it has no kernel for {group} query heads to a key head, only up to {LINES}"


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    indices: Tensor,
    page: int,
    kv_heads: int,
    scratch: Scratch,
    *,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention ``[N, query_heads, head_dim]`` of *q*, in its shape and dtype, over keys that are in the memory.

    :param keys: and *values* ``[tokens, kv_heads * head_dim]``. :param page: tokens of a page.
    :param tiles: int32 ``[tiles, FIELDS]``: the step's queries, ``LINES // group`` of them at most in a tile.
    :param indices: int32, the pages of all rows.
    :param scratch: how many programs share a context. Results do not depend on it.
    :param window: with *causal* only. Also *scale*, *softcap*: as in ``KVPlan.attend``.
    """
    rows, heads, size = q.shape
    group = heads // kv_heads
    if not (keys.is_contiguous() and values.is_contiguous()) or keys.dtype is not q.dtype:
        raise ValueError(f"keys must be contiguous and {q.dtype}, as the queries are")
    if q.stride(2) != 1 or q.stride(1) != size:
        q = q.contiguous()
    out = torch.empty((rows, heads, size), dtype=q.dtype, device=q.device)
    if not rows:
        return out
    block, warps, stages = _launch(size)
    scale = (size**-0.5 if scale is None else float(scale)) * _LOG2E
    _attend[(tiles.shape[0], scratch.parts, kv_heads)](
        q, keys, values, tiles, indices, out, scratch.shares, scratch.sums, scratch.counters,
        scratch.pieces, scratch.lines, q.stride(0), group, kv_heads, size, page,
        scale, float(softcap or 0), int(window or 0), causal,
        FIELDS, LINES, block, PIECE, pdl.enabled(), num_warps=warps, num_stages=stages, **pdl.options(),
    )  # fmt: skip
    return out
