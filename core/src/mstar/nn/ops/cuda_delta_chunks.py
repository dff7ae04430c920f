"""The gated delta rule over rows of many tokens, as two Triton kernels.

What a token adds to the matrix depends on what those before it added. Within a chunk of 64 tokens that is a triangular
system, whose solution is linear in the matrix before the chunk (arXiv:2406.06484 section 3, with the decay of
arXiv:2412.06464 section 3.3): ``new = u − w S``. :func:`_prepare` computes u and w, and what else of a chunk does not
depend on the matrix, for all chunks at once; :func:`_scan` takes each row's matrix through its chunks.

Sums, the triangular system and the matrix are float32; factors of the large products have the dtype of the values, as
in flash-linear-attention's kernels.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.delta import CHUNK, Spans, StateSlots

__all__ = ["gates", "rule", "takes", "takes_rows", "warps"]

_SIZES = (16, 32, 64, 128)
_COLUMNS, _SCANNING = 32, 4
"""Columns of a matrix that one program takes through a row's chunks, and its warps, for sizes that models have."""
_AMPLE = 160 << 10
"""Bytes of shared memory a program, from which on float32 fits in, and the next chunk can be fetched ahead."""
_LARGE = 200 << 10
"""From here on the one after it too, so that fetching is not waited for."""
_PRECISION = "tf32x3"
"""Of products of float32: three on tensor cores, nearly exact."""
_ROUNDED = "tf32"
"""Of those that solve a chunk's system where the solution is rounded to 16 bits anyway, and its keys were: what one on
tensor cores rounds is a quarter of that (a tenth more of error where all keys are alike, none where they are not)."""


def warps(key: int, value: int) -> int:
    """Warps of a program. Four make products of a whole warp group; two cannot. The ptxas of Triton 3.6 (CUDA 12.8)
    takes a shared address for the descriptor of such a product where a kernel has several of different widths behind a
    branch (seen in its output for keys of 16, values of 32), so only sizes that models have are computed that way."""
    return 4 if key == value >= 64 else 2


def takes(pool: Tensor) -> bool:
    """Whether there are kernels for matrices in *pool* ``[places, heads, K, V]``."""
    return pool.shape[2] in _SIZES and pool.shape[3] in _SIZES


def takes_rows(x: Tensor) -> bool:
    """Whether rows of many tokens with such inputs fit into the memory of the device's processors."""
    return x.dtype is not torch.float32 or _ample(x.device)


def _ample(device: torch.device) -> bool:
    return _shared(device) >= _AMPLE


def _stages(device: torch.device) -> int:
    return 1 + (_shared(device) >= _AMPLE) + (_shared(device) >= _LARGE)


@cache
def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return _LARGE
    memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return memory


@triton.jit
def gates(a, b, a_log, dt_bias):
    """The logarithm of what a head keeps, and how much of a correction it takes over."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    soft = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20))))
    beta = 1 / (1 + tl.exp(-b.to(tl.float32)))
    return -tl.exp(a_log.to(tl.float32)) * soft, beta.to(b.dtype).to(tl.float32)


@triton.jit
def _inverse(lower, chunk: tl.constexpr, precision: tl.constexpr):
    """``(1 + lower)⁻¹`` of a strictly lower triangular matrix: by substitution within blocks of 16 on the diagonal, all
    of them at once, then twice from blocks to blocks of double the size."""
    at = tl.arange(0, chunk)
    i, j = at[:, None], at[None, :]
    # The blocks by themselves, which a warp each can hold: no line waits for other warps.
    blocks: tl.constexpr = chunk // 16
    number = tl.arange(0, blocks)
    same = number[:, None, None, None] == number[None, None, :, None]
    apart = tl.reshape(lower, (blocks, 16, blocks, 16))
    found = -tl.sum(tl.where(same, apart, 0.0), 2)
    place = tl.arange(0, 16)[None, :, None]
    for line in range(1, 16):
        row = tl.sum(tl.where(place == line, found, 0.0), 1)
        row += tl.sum(row[:, :, None] * found, 1)
        found = tl.where(place == line, row[:, None, :], found)
    found = tl.reshape(tl.where(same, found[:, :, None, :], 0.0), (chunk, chunk))
    found += tl.where(i == j, 1.0, 0.0)
    found = _joined(found, lower, i, j, 16, precision)
    return _joined(found, lower, i, j, 32, precision)


@triton.jit
def _joined(found, lower, i, j, size: tl.constexpr, precision: tl.constexpr):
    """Inverses of blocks of *size* on the diagonal made those of blocks of double the size."""
    below = (i // size == j // size + 1) & (i // (2 * size) == j // (2 * size))
    step = tl.dot(found, tl.where(below, lower, 0.0), input_precision=precision)
    return found - tl.dot(step, found, input_precision=precision)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["a", "b", "table"])
def _prepare(
    q, k, v, a, b, a_log, dt_bias, table, solved, reads, writes, within, left, most, q_stride: tl.constexpr,
    k_stride: tl.constexpr, v_stride: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr,
    group: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, chunk: tl.constexpr,
    raw: tl.constexpr, longer: tl.constexpr, precision: tl.constexpr, solving: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program: one head of one chunk. By token and head it leaves *solved* u ``[V]``, *reads* ``[2, K]``
    w and the query for the matrix before the chunk, *writes* ``[K]`` keys for the matrix after it, *within* ``[chunk]``
    weights of the chunk's tokens; *left* ``[chunks, heads]``: what remains of the matrix before.

    :param raw: *a* and *b* are a layer's, of which gates are made; else they are the gates.
    :param longer: nothing is done for rows of one token.
    """
    pdl.begin(early)
    number = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(table + number).to(tl.int64)
    count = tl.load(table + most + number)
    if count == 0:
        return
    if longer:  # noqa: SIM102 (a constant: without it there is no second one)
        if tl.load(table + 2 * most + number) == 1:
            return
    at = tl.arange(0, chunk)
    at_k, at_v = tl.arange(0, key)[None, :], tl.arange(0, value)[None, :]
    real = at < count
    token = first + at
    inside = real[:, None]
    keys = tl.load(k + token[:, None] * k_stride + (head // group) * key + at_k, mask=inside, other=0).to(tl.float32)
    keys = keys * (1 / tl.sqrt_rn(tl.sum(keys * keys, 1) + 1e-6))[:, None]
    g = tl.load(a + token * a_stride + head, mask=real, other=0)
    beta = tl.load(b + token * b_stride + head, mask=real, other=0)
    if raw:
        g, beta = gates(g, beta, tl.load(a_log + head), tl.load(dt_bias + head))
    g, beta = tl.where(real, g.to(tl.float32), 0.0), tl.where(real, beta.to(tl.float32), 0.0)
    decay = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    earlier = at[:, None] >= at[None, :]
    between = tl.where(earlier, tl.exp(tl.where(earlier, decay[:, None] - decay[None, :], 0.0)), 0.0)
    dtype = solved.dtype.element_ty
    k_small = keys.to(dtype)
    # The largest tiles one after the other, and none of them while the system is solved: all of them at once would not
    # fit into the registers.
    place = (token * v_heads + head)[:, None]
    tl.store(writes + place * key + at_k, (keys * tl.exp(total - decay)[:, None]).to(dtype), mask=inside)
    tl.store(left + number * v_heads + head, tl.exp(total))
    dependent = (keys * (beta * tl.exp(decay))[:, None]).to(dtype)
    queries = tl.load(q + token[:, None] * q_stride + (head // group) * key + at_k, mask=inside, other=0).to(tl.float32)
    queries = queries * (1 / tl.sqrt_rn(tl.sum(queries * queries, 1) + 1e-6) * (key**-0.5))[:, None]
    tl.store(reads + place * 2 * key + key + at_k, (queries * tl.exp(decay)[:, None]).to(dtype), mask=inside)
    weights = tl.dot(queries.to(dtype), tl.trans(k_small), input_precision=precision) * between
    tl.store(within + place * chunk + at[None, :], weights.to(dtype), mask=inside)
    inverse = tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    if count > 1:
        own = tl.dot(k_small, tl.trans(k_small), input_precision=precision) * between * beta[:, None]
        inverse = _inverse(tl.where(at[:, None] > at[None, :], own, 0.0), chunk, solving)
    inverse = inverse.to(dtype)
    w = tl.dot(inverse, dependent, input_precision=precision)
    tl.store(reads + place * 2 * key + at_k, w.to(dtype), mask=inside)
    values = tl.load(v + token[:, None] * v_stride + head * value + at_v, mask=inside, other=0).to(tl.float32)
    u = tl.dot(inverse, (values * beta[:, None]).to(dtype), input_precision=precision)
    tl.store(solved + place * value + at_v, u.to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["offsets", "first_chunks", "state_source", "state_target"])
def _scan(
    solved, reads, writes, within, left, offsets, first_chunks, states, state_source, state_target, out,
    state_stride: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr, kept: tl.constexpr, longer: tl.constexpr, precision: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program: *columns* columns of one head's matrix through the chunks of one row. *longer*: as above."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - begin).to(tl.int32)
    if longer:  # noqa: SIM102 (a constant: without it there is no second one)
        if length == 1:
            return
    left += tl.load(first_chunks + row) * v_heads + head
    at = tl.arange(0, chunk)
    at_k, at_v = tl.arange(0, key), tl.program_id(2) * columns + tl.arange(0, columns)
    dtype = solved.dtype.element_ty
    matrix = head * key * value + at_k[:, None] * value + at_v[None, :]
    s = tl.load(states + tl.load(state_source + row) * state_stride + matrix).to(tl.float32)
    # The numbers of all chunks are as far apart, so that a chunk's addresses cost an addition, and what those to come
    # need can be fetched while one is computed.
    first = at.to(tl.int64) * v_heads + head
    twice = tl.arange(0, 2 * chunk)  # what each token reads with: all w, then all queries
    read_at = (twice % chunk).to(tl.int64) * v_heads + head
    reads_at = reads + (read_at * 2 + twice // chunk)[:, None] * key + at_k[None, :]
    k_at = writes + first[:, None] * key + at_k[None, :]
    u_at = solved + first[:, None] * value + at_v[None, :]
    out_at = out + first[:, None] * value + at_v[None, :]
    weights_at = within + first[:, None] * chunk + at[None, :]
    chunks = tl.cdiv(length, chunk)
    remains = tl.load(left, mask=chunks > 0, other=0)
    for number in range(chunks):
        later = tl.load(left + (number + 1) * v_heads, mask=number + 1 < chunks, other=0)  # not waited for here
        further = (begin + number * chunk) * v_heads
        inside = (at < length - number * chunk)[:, None]
        read = (twice % chunk < length - number * chunk)[:, None]
        small = s.to(dtype)
        by = tl.load(reads_at + further * (2 * key), mask=read, other=0)
        found = tl.reshape(tl.dot(by, small, input_precision=precision), (2, chunk, columns))
        held, o = tl.split(tl.permute(found, (1, 2, 0)))
        u = tl.load(u_at + further * value, mask=inside, other=0).to(tl.float32)
        new = (u - held).to(dtype)
        weights = tl.load(weights_at + further * chunk, mask=inside, other=0)
        o += tl.dot(weights, new, input_precision=precision)
        tl.store(out_at + further * value, o.to(out.dtype.element_ty), mask=inside)
        k = tl.load(k_at + further * key, mask=inside, other=0)
        s = s * remains + tl.dot(tl.trans(k), new, input_precision=precision)
        remains = later
    if kept:
        tl.store(states + tl.load(state_target + row) * state_stride + matrix, s.to(states.dtype.element_ty))


def rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    spans: Spans,
    state: StateSlots,
    longer: bool = False,
) -> Tensor:
    """:func:`mstar.nn.ops.delta.gated_delta_rule`; with *a_log* and *dt_bias* the gates are made of *a* and *b* first.
    All of *q*, *k* and *v* have heads that follow one another.

    :param longer: rows of one token are left to the caller, their outputs and states too.
    """
    _, v_heads, key, value = state.pool.shape
    tokens, table = spans.tokens, spans.chunks
    most = table.shape[1]
    out = v.new_empty((tokens, v_heads, value))
    solved = v.new_empty((tokens, v_heads, value))
    reads, writes = v.new_empty((tokens, v_heads, 2, key)), v.new_empty((tokens, v_heads, key))
    within = v.new_empty((tokens, v_heads, CHUNK))
    left = torch.empty((most, v_heads), dtype=torch.float32, device=v.device)
    stages = 1 if v.dtype is torch.float32 else _stages(v.device)
    log, bias = (a, a) if a_log is None or dt_bias is None else (a_log, dt_bias)
    if most and spans.rows:
        _prepare[(most, v_heads)](
            q, k, v, a, b, log, bias, table, solved, reads, writes, within, left, most, q.stride(0),
            k.stride(0), v.stride(0), a.stride(0), b.stride(0), v_heads // q.shape[1], v_heads, key, value, CHUNK,
            a_log is not None, longer, _PRECISION, _PRECISION if v.dtype is torch.float32 else _ROUNDED, pdl.enabled(),
            num_warps=warps(key, value), **pdl.options(),
        )  # fmt: skip
        columns = min(_COLUMNS, value)
        target = state.source if state.target is None else state.target
        _scan[(spans.rows, v_heads, value // columns)](
            solved, reads, writes, within, left, spans.offsets, spans.first_chunks, state.pool, state.source,
            target, out, state.pool.stride(0), v_heads, key, value, columns, CHUNK, state.target is not None, longer,
            _PRECISION, pdl.enabled(), num_warps=_SCANNING if warps(key, value) == 4 else warps(key, value),
            num_stages=stages, **pdl.options(),
        )  # fmt: skip
    return out
