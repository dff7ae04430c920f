"""Decoding as one Triton kernel a layer: norm and rotate queries and keys, store the new keys and values, attend.

For steps of few rows with one query each, where the time goes into launches and latencies and not into the bytes of the
cache. The context of a row is divided among programs ("flash decoding", Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Each leaves the result of its share and the
logarithm of its weight; the one that comes last adds the shares up, in their order, so that a result never depends on
who was last.

All that changes from step to step is read on the device: a captured graph replays with other contexts. How many
programs a row has is fixed by the launch. How many of them have work follows from the row's length.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.reference import HeadNorms

__all__ = ["MOST_SPLITS", "Scratch", "decode_heads", "splits_for", "takes"]

MOST_SPLITS = 16
"""Programs that may share a row's context of one key head: adding up more shares takes longer than they save."""
_FILLED = 1.8
"""Programs for each multiprocessor that a launch is divided into at least."""
_LONG = 1024
"""Tokens of a share that is worth dividing, although there are programs enough: one long context among others would be
waited for by all."""
_GROUP = 16
"""Rows of the tensor cores' smallest tile, and so the most query heads of one key head."""
_SIZES = (64, 128, 256)
_TYPES = (torch.bfloat16, torch.float16)
_COMBINED = 1 << 14
"""Floats that the last program adds up at a time: 128 registers of each of its threads."""
_LOG2E = math.log2(math.e)


def _launch(size: int) -> tuple[int, int, int]:
    """Tokens of a block, warps and pipeline stages for heads of *size*: some 32 kB of keys and values a block, two of
    which are on their way. Two stages of the pipeline are one block: first its page numbers are fetched."""
    return (32, 4, 5) if size == 256 else (64, 4, 5)


@triton.jit
def _turned(line, weight, c, s, eps, inside, size: tl.constexpr, normed: tl.constexpr):
    """Heads at *line*, pointers ``[heads, 1]``, normed and rotated; in their dtype, ``[heads, size]``."""
    at = tl.arange(0, size)[None, :]
    across = (at + size // 2) % size
    x = tl.load(line + at, mask=inside, other=0).to(tl.float32)
    y = tl.load(line + across, mask=inside, other=0).to(tl.float32)
    if normed:
        scale = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / size + eps)
        x = x * scale[:, None] * tl.load(weight + at).to(tl.float32)
        y = y * scale[:, None] * tl.load(weight + across).to(tl.float32)
    return (x * c + y * s).to(line.dtype.element_ty)


@triton.jit
def _logits(products, scale: tl.constexpr, softcap: tl.constexpr):
    """To base 2. *scale* has that in it already."""
    if softcap > 0:
        grown = tl.exp2(products * (2 * scale / softcap))  # tanh x = 1 - 2 / (exp 2x + 1), right at infinities too
        return softcap * 1.4426950408889634 * (1 - 2 / (grown + 1))
    else:
        return products * scale


@triton.jit(do_not_specialize=["usual", "long"], do_not_specialize_on_alignment=["places", "indptr", "last", "indices"])
def _attend_rows(
    heads, cos, sin, q_weight, k_weight, eps, keys, values, places, indptr, last, indices, out, shares, sums, counters,
    usual, long, stride: tl.constexpr, group: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr,
    page: tl.constexpr, normed: tl.constexpr, scale: tl.constexpr, softcap: tl.constexpr, window: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, most_splits: tl.constexpr, part: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program takes one row's query heads of one key head over a share of the context.

    *usual*: shares of a context; those of more than *long* blocks are divided further, as far as there are programs.
    *window*: tokens that a query sees, itself included; 0 for all. *tile*: *group* filled up. *part*: heads whose
    shares are added up at a time.
    """
    # Later shares begin last: where they have no work, they end beside those that have.
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    splits = tl.num_programs(2)
    width: tl.constexpr = kv_heads * size
    turning: tl.constexpr = group * kv_heads
    pdl.begin(early)
    pages, pages_end, in_last = tl.load(indptr + row), tl.load(indptr + row + 1), tl.load(last + row)
    # Queries are loaded before anything is computed from these, so that both are on their way together.
    at = tl.arange(0, size)[None, :]
    g = tl.arange(0, tile)[:, None]
    inside = g < group
    c = tl.load(cos + row * size + at).to(tl.float32)
    s = tl.load(sin + row * size + at).to(tl.float32)
    line = heads + row * stride + head * (group * size)
    q = _turned(line + g * size, q_weight, c, s, eps, inside, size, normed)
    # --- this program's share, in blocks of tokens; the new token, which is the last, is not in the memory yet --------
    length = (pages_end - pages - 1) * page + in_last
    before = length - 1
    if window > 0:
        low = tl.maximum(length - window, 0)
    else:
        low = 0
    begin = low // block
    count = tl.where(low < before, tl.cdiv(before, block) - begin, 0)
    each = tl.maximum(tl.cdiv(count, splits), tl.maximum(tl.minimum(tl.cdiv(count, usual), long), 1))
    active = tl.maximum(tl.cdiv(count, each), 1)
    if split >= active:
        return
    # --- the new token ------------------------------------------------------------------------------------------------
    if split == active - 1:
        fresh = heads + row * stride + (turning + head) * size + tl.zeros((1, 1), tl.int32)
        k = _turned(fresh, k_weight, c, s, eps, True, size, normed)
        v = tl.load(fresh + width + at)
        place = tl.load(places + row) * width + head * size + at
        tl.store(keys + place, k)
        tl.store(values + place, v)
        top = _logits(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), scale, softcap)
        total = tl.full((tile,), 1.0, tl.float32)
        mixed = tl.broadcast_to(v.to(tl.float32), (tile, size))
    else:
        top = tl.full((tile,), float("-inf"), tl.float32)
        total = tl.zeros((tile,), tl.float32)
        mixed = tl.zeros((tile, size), tl.float32)
    # --- the share of the context -------------------------------------------------------------------------------------
    first = begin + split * each
    for index in tl.range(first, tl.minimum(first + each, begin + count)):
        token = index * block + tl.arange(0, block)
        seen = (token >= low) & (token < before)
        found = tl.load(indices + pages + token // page, mask=seen, other=0).to(tl.int64)
        place = ((found * page + token % page) * width + head * size)[:, None] + at
        k = tl.load(keys + place, mask=seen[:, None], other=0)
        v = tl.load(values + place, mask=seen[:, None], other=0)
        logits = _logits(tl.dot(q, tl.trans(k)), scale, softcap)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))  # finite: each block has a token that is seen
        kept = tl.exp2(top - higher)
        weights = tl.exp2(logits - higher[:, None])
        total = total * kept + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * kept[:, None])
        top = higher
    # --- the shares together ------------------------------------------------------------------------------------------
    mixed = mixed / total[:, None]
    result = out + row * (turning * size) + head * (group * size)
    if active == 1:
        tl.store(result + g * size + at, mixed.to(out.dtype.element_ty), mask=inside)
        return
    cell = row * kv_heads + head
    mine = (cell * splits + split) * group + tl.arange(0, tile)
    real = tl.arange(0, tile) < group
    tl.store(shares + mine[:, None] * size + at, mixed, mask=inside)
    tl.store(sums + mine, top + tl.log2(total), mask=real)
    tl.debug_barrier()  # all threads have stored before one tells of it
    if tl.atomic_add(counters + cell, 1, sem="acq_rel", scope="gpu") != active - 1:
        return
    tl.store(counters + cell, 0)  # as the next launch must find it
    other = tl.arange(0, most_splits)[:, None, None]
    for some in tl.static_range(0, group, part):
        h = some + tl.arange(0, part)[None, :, None]
        known = (other < active) & (h < group)
        of = (cell * splits + other) * group + h
        logs = tl.load(sums + of, mask=known, other=float("-inf"), cache_modifier=".cg")
        spread = of * size + tl.arange(0, size)[None, None, :]
        mixes = tl.load(shares + spread, mask=known, other=0, cache_modifier=".cg")
        best = tl.max(logs, 0)[None, :, :]  # minus infinity beyond the last head, which nothing keeps
        weight = tl.exp2(logs - tl.where(best == float("-inf"), 0.0, best))
        summed = tl.sum(mixes * weight, 0) / tl.sum(weight, 0)
        lines = some + tl.arange(0, part)[:, None]
        tl.store(result + lines * size + at, summed.to(out.dtype.element_ty), mask=lines < group)


class Scratch:
    """What programs leave for each other, for up to *programs* of them. Kernels of one stream share it.

    :ivar counters: int32, of each row and key head how many shares are done; 0 between launches.
    """

    def __init__(self, programs: int, size: int, device: torch.device | str):
        self.programs, self.size = programs, size
        with torch.inference_mode(False):  # usable in and outside of inference mode, whoever comes first
            self.shares = torch.empty(programs * _GROUP * size, dtype=torch.float32, device=device)
            self.sums = torch.empty(programs * _GROUP, dtype=torch.float32, device=device)
            self.counters = torch.zeros(programs, dtype=torch.int32, device=device)


def takes(dtype: torch.dtype, size: int) -> bool:
    """Whether there is a kernel for heads of *size* in *dtype*."""
    return dtype in _TYPES and size in _SIZES


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(rows: int, kv_heads: int, device: torch.device) -> int:
    """Among how many programs each row's context of a key head is divided."""
    splits, processors = 1, _processors(device)
    while splits < MOST_SPLITS and rows * kv_heads * splits < _FILLED * processors:
        splits *= 2
    return splits


def decode_heads(
    heads: Tensor,
    q_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    page: int,
    scratch: Scratch,
    splits: int,
    *,
    usual: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor | None:
    """``rotate_store`` and attention of rows with one query each.

    :param heads: ``[rows, q_heads + 2 * kv_heads, head_dim]``: queries, keys, values; not changed.
    :param keys: and *values* ``[tokens, kv_heads * head_dim]``, which get the new ones at *places* int64 ``[rows]``.
    :param tables: int32, contexts with the new token as their last: where each row's pages begin in the third
        ``[rows + 1]``, tokens in its last page ``[rows]``, all rows' pages of *page* tokens.
    :param splits: programs that a row's context is divided among. A row's result depends on it, and on no other row.
    :param usual: as many as are to share a context that is not long; ``None``: all of them.
    :param window: , *scale* and *softcap*: as in ``KVPlan.attend``.
    :returns: ``[rows, q_heads, head_dim]``; ``None`` if the kernel does not take this, and nothing was done.
    """
    rows, count, size = heads.shape
    kv_heads = (count - q_heads) // 2
    group = q_heads // kv_heads
    stride, *inner = heads.stride()
    weights = () if norms is None else (norms.q, norms.k)
    if not takes(heads.dtype, size) or inner != [size, 1] or group > _GROUP:
        return None
    if any(not x.is_contiguous() or x.dtype is not heads.dtype for x in (cos, sin, keys, values)):
        return None
    if any(not x.is_contiguous() or x.dtype not in (heads.dtype, torch.float32) for x in weights):
        return None
    if rows * kv_heads * splits > scratch.programs or size > scratch.size or splits > MOST_SPLITS:
        raise ValueError(f"{rows} rows of {kv_heads} key heads in {splits} splits are more than the scratch is for")
    out = heads.new_empty((rows, q_heads, size))
    if not rows:
        return out
    q_weight, k_weight, eps = (heads, heads, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    scale = (size**-0.5 if scale is None else float(scale)) * _LOG2E
    indptr, last, indices = tables
    block, warps, stages = _launch(size)
    most = triton.next_power_of_2(group)
    part = max(min(most, _COMBINED // (MOST_SPLITS * size)), 1)
    _attend_rows[(kv_heads, rows, splits)](
        heads, cos, sin, q_weight, k_weight, float(eps), keys, values, places, indptr, last, indices, out,
        scratch.shares, scratch.sums, scratch.counters, usual or splits, _LONG // block,
        stride, group, kv_heads, size, page, norms is not None, scale, float(softcap or 0), int(window or 0),
        _GROUP, block, MOST_SPLITS, part, pdl.enabled(), num_warps=warps, num_stages=stages, **pdl.options(),
    )  # fmt: skip
    return out
