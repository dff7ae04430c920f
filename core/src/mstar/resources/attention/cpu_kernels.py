"""numba kernels of attention for one query a row, over keys and values in pages. Importing this compiles them.

Online softmax (Milakov & Gimelshein 2018; FlashAttention, arXiv:2205.14135) in float32 over blocks of tokens, which are
read through the page table where they lie. The query heads that share a key head work on a block while it is in the
first-level cache. A row's result depends on that row only: the order of its sums is the same in every batch.
"""

from __future__ import annotations

import numpy as np

from mstar.nn.ops.jit import claim, double_at, exp, function, kernel, narrow, prefetch, view, widen

__all__ = ["decode_kernels"]

_BLOCK = 32  # tokens; the widened keys of a block, 8 KiB for heads of 64, stay in the first-level cache


@function
def _locate(offsets, table, page_size, first, count, width, head_offset):  # type: ignore[no-untyped-def]
    """Where the keys of *count* tokens from *first* on begin; filled up to a multiple of 4 with the last one."""
    for j in range(count):
        token = first + j
        page = token // page_size
        offsets[j] = (table[page] * page_size + token - page * page_size) * width + head_offset
    for j in range(count, (count + 3) // 4 * 4):
        offsets[j] = offsets[count - 1]


@function
def _widen_rows(memory, offsets, count, size, wide):  # type: ignore[no-untyped-def]
    for j in range(count):
        source, target = memory[offsets[j] : offsets[j] + size], wide[j * size : (j + 1) * size]
        for i in range(size):
            target[i] = widen(source[i])


@function
def _scores(query, wide, count, stride, scores):  # type: ignore[no-untyped-def]
    """Dot products of *query* with *count* (a multiple of 4) rows of *wide*; four at a time share each load."""
    size = len(query)
    for j in range(0, count, 4):
        k0, k1 = wide[j * stride : j * stride + size], wide[(j + 1) * stride : (j + 1) * stride + size]
        k2, k3 = wide[(j + 2) * stride : (j + 2) * stride + size], wide[(j + 3) * stride : (j + 3) * stride + size]
        s0 = s1 = s2 = s3 = np.float32(0)
        for i in range(size):
            s0 += query[i] * k0[i]
            s1 += query[i] * k1[i]
            s2 += query[i] * k2[i]
            s3 += query[i] * k3[i]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0, s1, s2, s3


@function
def _softmax_block(scores, count, top, total):  # type: ignore[no-untyped-def]
    """Turn *count* scores into weights relative to the new top; returns it, the new total, and what to rescale by."""
    new_top = top
    for j in range(count):
        new_top = max(new_top, scores[j])
    added = np.float32(0)
    for j in range(count):
        weight = exp(scores[j] - new_top)
        scores[j] = weight
        added += weight
    for j in range(count, (count + 3) // 4 * 4):
        scores[j] = np.float32(0)
    rescale = exp(top - new_top)
    return new_top, total * rescale + added, rescale


@function
def _accumulate(mixed, rescale, weights, wide, count, stride):  # type: ignore[no-untyped-def]
    """*mixed* times *rescale* plus the weighted sum of *count* (a multiple of 4) rows of *wide*."""
    size = len(mixed)
    for j in range(0, count, 4):
        v0, v1 = wide[j * stride : j * stride + size], wide[(j + 1) * stride : (j + 1) * stride + size]
        v2, v3 = wide[(j + 2) * stride : (j + 2) * stride + size], wide[(j + 3) * stride : (j + 3) * stride + size]
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        factor = rescale if j == 0 else np.float32(1)
        for i in range(size):
            mixed[i] = mixed[i] * factor + (w0 * v0[i] + w1 * v1[i]) + (w2 * v2[i] + w3 * v3[i])


@function
def _prefetch_share(address, offsets, count, row_bytes, item, turn, turns):  # type: ignore[no-untyped-def]
    """Prefetch the *turn*-th of *turns* shares of the rows: a core can wait for a dozen lines at a time, so memory and
    arithmetic overlap only if requests are spread over the arithmetic."""
    for j in range(turn * count // turns, (turn + 1) * count // turns):
        prefetch(address + offsets[j] * item, row_bytes)


@function
def _decode(block, dtype, item):  # type: ignore[no-untyped-def]
    args = view(block, 19, np.int64)
    rows, stride, tokens, kv_heads, shared, size = args[8], args[9], args[10], args[11], args[12], args[13]
    page_size, pages, scale, heads = args[14], args[15], double_at(block, 16), args[17]
    width, group, part = kv_heads * size, shared * size, heads * size
    q, out = view(args[1], rows * stride, dtype), view(args[2], rows * kv_heads * group, dtype)
    keys, values = view(args[3], tokens * width, dtype), view(args[4], tokens * width, dtype)
    tables = view(args[5], rows * pages, np.int32)
    lows, ends = view(args[6], rows, np.int64), view(args[7], rows, np.int64)
    offsets, ahead = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    wide = np.empty(_BLOCK * part, np.float32)
    query, mixed = np.empty(heads * group, np.float32), np.empty(heads * group, np.float32)
    scores = np.empty(heads * shared * _BLOCK, np.float32)
    top, total = np.empty(heads * shared, np.float32), np.empty(heads * shared, np.float32)
    rescale = np.empty(heads * shared, np.float32)
    parts = kv_heads // heads
    unit = claim(block, 1)
    while unit < rows * parts:
        row, first_head = unit // parts, unit % parts * heads
        begin = row * stride + first_head * group
        for i in range(heads * group):
            query[i] = widen(q[begin + i]) * scale
            mixed[i] = np.float32(0)
        for h in range(heads * shared):
            top[h], total[h] = -np.inf, np.float32(0)
        table, end = tables[row * pages : (row + 1) * pages], ends[row]
        count = min(_BLOCK, end - lows[row])
        _locate(ahead, table, page_size, lows[row], count, width, first_head * size)
        for first in range(lows[row], end, _BLOCK):
            offsets, ahead = ahead, offsets
            count = min(_BLOCK, end - first)
            padded = (count + 3) // 4 * 4
            _widen_rows(keys, offsets, padded, part, wide)
            for h in range(heads * shared):
                mine, own = scores[h * _BLOCK : (h + 1) * _BLOCK], query[h * size : (h + 1) * size]
                _scores(own, wide[h // shared * size :], padded, part, mine)
                _prefetch_share(args[4], offsets, count, part * item, item, h, heads * shared)
                top[h], total[h], rescale[h] = _softmax_block(mine, count, top[h], total[h])
            more = max(0, min(_BLOCK, end - first - _BLOCK))
            if more:
                _locate(ahead, table, page_size, first + _BLOCK, more, width, first_head * size)
            _widen_rows(values, offsets, padded, part, wide)
            for h in range(heads * shared):
                mine, own = scores[h * _BLOCK : (h + 1) * _BLOCK], mixed[h * size : (h + 1) * size]
                _prefetch_share(args[3], ahead, more, part * item, item, h, heads * shared)
                _accumulate(own, rescale[h], mine, wide[h // shared * size :], padded, part)
        begin = row * kv_heads * group + first_head * group
        for h in range(heads * shared):
            share = np.float32(1) / total[h]
            for i in range(h * size, (h + 1) * size):
                out[begin + i] = narrow(mixed[i] * share, out[begin + i])
        unit = claim(block, 1)


@kernel(17)
def _decode_f32(block: int) -> None:
    _decode(block, np.float32, 4)


@kernel(17)
def _decode_bf16(block: int) -> None:
    _decode(block, np.uint16, 2)


# For float32 and for bfloat16.
decode_kernels = (_decode_f32, _decode_bf16)
