"""The operations of :mod:`mstar.nn.ops.delta` as Triton kernels. What a kernel does not take goes to the reference.

Where every row has one token, one launch does all of a layer's: a program takes some columns of one head's matrix,
which do not depend on the others, and computes the convolution and the gates that they need. It reads states in one
place and writes them to another, so programs may share what they read. Longer rows are a launch for the convolution and
two for the rule (:mod:`mstar.nn.ops.cuda_delta_chunks`).

Nothing here asks the device anything: every call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import cuda_delta_chunks as chunks
from mstar.nn.ops import delta_reference as reference
from mstar.nn.ops import pdl
from mstar.nn.ops.cuda import _known, _power
from mstar.nn.ops.delta import Spans, StateSlots

__all__ = ["causal_conv", "gated_delta_net", "gated_delta_rule", "gated_rms_norm"]

_COLUMNS = 32
"""Columns of a matrix that one program of a decoding step takes: at one row of 32 heads there are programs for most of
a large GPU, and each still reads lines of 128 bytes."""
_CHANNELS = 512
"""Channels of one token that one program convolves."""


# --- one token a row --------------------------------------------------------------------------------------------------
@triton.jit
def _convolved(row, weight, window, channel, inside, width: tl.constexpr):
    """The convolution's new outputs of some channels, rounded to their dtype, in float32."""
    x = tl.load(row + channel, mask=inside, other=0)
    total = x.to(tl.float32) * tl.load(weight + channel * width + width - 1, mask=inside, other=0).to(tl.float32)
    for tap in tl.static_range(width - 1):
        old = tl.load(window + channel * (width - 1) + tap, mask=inside, other=0).to(tl.float32)
        total += old * tl.load(weight + channel * width + tap, mask=inside, other=0).to(tl.float32)
    return (total / (1 + tl.exp(-total))).to(x.dtype).to(tl.float32)


@triton.jit
def _shift(row, window, target, channel, inside, width: tl.constexpr):
    """Write the window that ends with this token."""
    for tap in tl.static_range(width - 2):
        old = tl.load(window + channel * (width - 1) + tap + 1, mask=inside, other=0)
        tl.store(target + channel * (width - 1) + tap, old, mask=inside)
    new = tl.load(row + channel, mask=inside, other=0)
    tl.store(target + channel * (width - 1) + width - 2, new.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["a", "b", "window_source", "window_target", "state_source", "state_target"])
def _decode(
    mixed, a, b, weight, a_log, dt_bias, windows, window_source, window_target, states, state_source, state_target, out,
    stride: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr, window_stride: tl.constexpr,
    state_stride: tl.constexpr, width: tl.constexpr, k_heads: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr,
    value: tl.constexpr, columns: tl.constexpr, window_kept: tl.constexpr, state_kept: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One program: *columns* columns of one head's matrix of one row."""
    group: tl.constexpr = v_heads // k_heads
    keys: tl.constexpr = k_heads * key
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.program_id(2)
    at_k = tl.arange(0, key)
    at_v = block * columns + tl.arange(0, columns)
    k_inside, v_inside = at_k < key, at_v < value
    q_channel = (head // group) * key + at_k
    v_channel = 2 * keys + head * value + at_v
    source = mixed + row * stride
    window = windows + tl.load(window_source + row) * window_stride
    q = _convolved(source, weight, window, q_channel, k_inside, width)
    k = _convolved(source, weight, window, q_channel + keys, k_inside, width)
    v = _convolved(source, weight, window, v_channel, v_inside, width)
    if window_kept:
        target = windows + tl.load(window_target + row) * window_stride
        _shift(source, window, target, v_channel, v_inside, width)
        # the first of the programs that share queries and keys
        k_mine = k_inside & (tl.full(at_k.shape, head % group + block, tl.int32) == 0)
        _shift(source, window, target, q_channel, k_mine, width)
        _shift(source, window, target, q_channel + keys, k_mine, width)
    q = q * (1 / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6)) * (key**-0.5)
    k = k * (1 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
    g, beta = chunks.gates(
        tl.load(a + row * a_stride + head), tl.load(b + row * b_stride + head), tl.load(a_log + head),
        tl.load(dt_bias + head),
    )  # fmt: skip
    within = head * key * value + at_k[:, None] * value + at_v[None, :]
    s = tl.load(states + tl.load(state_source + row) * state_stride + within, mask=v_inside[None, :], other=0)
    s = s.to(tl.float32) * tl.exp(g)
    new = (v - tl.sum(s * k[:, None], 0)) * beta
    s += k[:, None] * new[None, :]
    o = tl.sum(s * q[:, None], 0)
    tl.store(out + (row * v_heads + head) * value + at_v, o.to(out.dtype.element_ty), mask=v_inside)
    if state_kept:
        kept = states + tl.load(state_target + row) * state_stride + within
        tl.store(kept, s.to(states.dtype.element_ty), mask=v_inside[None, :])


def gated_delta_net(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    spans: Spans,
    window: StateSlots,
    state: StateSlots,
) -> Tensor:
    _, v_heads, key, value = state.pool.shape
    keys = (mixed.shape[1] - v_heads * value) // 2
    fits = _fits(mixed, a, b, conv_weight, a_log, dt_bias, window.pool, state.pool) and chunks.takes(state.pool)
    fits = fits and (spans.single or chunks.takes_rows(mixed))
    if not fits or conv_weight.shape[1] < 2:
        return reference.gated_delta_net(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state)
    if not spans.single:
        mixed = causal_conv(mixed, conv_weight, None, spans, window)
        q, k = (each.unflatten(1, (-1, key)) for each in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
        v = mixed[:, 2 * keys :].unflatten(1, (v_heads, value))
        return chunks.rule(q, k, v, a, b, a_log, dt_bias, spans, state)
    out = mixed.new_empty((spans.rows, v_heads, value))
    if spans.rows:
        columns = min(_COLUMNS, value)
        _decode[(spans.rows, v_heads, value // columns)](
            mixed, a, b, conv_weight, a_log, dt_bias, window.pool, window.source, _or_source(window), state.pool,
            state.source, _or_source(state), out, mixed.stride(0), a.stride(0), b.stride(0), window.pool.stride(0),
            state.pool.stride(0), conv_weight.shape[1], keys // key, v_heads, key, value, columns,
            window.target is not None, state.target is not None, pdl.enabled(), num_warps=4, **pdl.options(),
        )  # fmt: skip
    return out


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Spans, state: StateSlots
) -> Tensor:
    packed = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
    known = packed and _fits(g, beta, state.pool) and _known(q, k, v)
    if not known or not chunks.takes(state.pool) or not chunks.takes_rows(v):
        return reference.gated_delta_rule(q, k, v, g, beta, spans, state)
    return chunks.rule(q, k, v, g, beta, None, None, spans, state)


def _fits(*tensors: Tensor) -> bool:
    """Whether the kernels know how each lies: any stride between rows or places, none within."""
    return _known(*tensors) and all(x.dim() < 2 or x[:1].is_contiguous() for x in tensors)


def _or_source(slots: StateSlots) -> Tensor:
    return slots.source if slots.target is None else slots.target


# --- the convolution of rows of any length ----------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["source", "target", "row_of", "offsets"])
def _conv(
    x, weight, bias, windows, source, target, row_of, offsets, out, tokens, stride: tl.constexpr,
    window_stride: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, biased: tl.constexpr,
    kept: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """The first *tokens* programs compute a token each, the others write a row's window."""
    before: tl.constexpr = width - 1
    pdl.begin(early)
    number = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    if number < tokens:
        row = tl.load(row_of + number)
        position = number - tl.load(offsets + row)
        window = windows + tl.load(source + row) * window_stride + channel * before
        total = tl.zeros((block,), tl.float32)
        if biased:
            total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
        for tap in tl.static_range(width):
            at = position + tap - before + channel * 0  # in the row, for each channel; the window lies before it
            own = tl.load(x + (number + tap - before) * stride + channel, mask=inside & (at >= 0), other=0)
            old = tl.load(window + at + before, mask=inside & (at < 0), other=0)
            w = tl.load(weight + channel * width + tap, mask=inside, other=0).to(tl.float32)
            total += (own.to(tl.float32) + old.to(tl.float32)) * w
        y = total / (1 + tl.exp(-total))
        tl.store(out + number * channels + channel, y.to(out.dtype.element_ty), mask=inside)
    elif kept:
        row = number - tokens
        end = tl.load(offsets + row + 1)
        length = end - tl.load(offsets + row)
        window = windows + tl.load(source + row) * window_stride + channel * before
        next_window = windows + tl.load(target + row) * window_stride + channel * before
        for tap in tl.static_range(before):
            at = length + tap - before + channel * 0
            own = tl.load(x + (end + tap - before) * stride + channel, mask=inside & (at >= 0), other=0)
            old = tl.load(window + at + before, mask=inside & (at < 0), other=0)
            new = own.to(windows.dtype.element_ty) + old
            tl.store(next_window + tap, new, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, spans: Spans, window: StateSlots) -> Tensor:
    channels, width = weight.shape
    known = _fits(x, weight, window.pool) and (bias is None or _known(bias))
    if not known or width < 2:
        return reference.causal_conv(x, weight, bias, spans, window)
    out = x.new_empty((spans.tokens, channels))
    block = min(_power(channels), _CHANNELS)
    rows = spans.rows if window.target is not None else 0
    if spans.tokens + rows:
        _conv[(spans.tokens + rows, -(-channels // block))](
            x, weight, x if bias is None else bias, window.pool, window.source, _or_source(window), spans.row_of,
            spans.offsets, out, spans.tokens, x.stride(0), window.pool.stride(0), channels, width, bias is not None,
            window.target is not None, block, pdl.enabled(), num_warps=4, **pdl.options(),
        )  # fmt: skip
    return out


# --- the norm behind it -----------------------------------------------------------------------------------------------
@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, eps, stride: tl.constexpr, gate_stride: tl.constexpr, heads: tl.constexpr, size: tl.constexpr,
    group: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program takes *group* heads of one token."""
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * group + tl.arange(0, group))[:, None]
    at = tl.arange(0, block)[None, :]
    inside = (head < heads) & (at < size)
    value = tl.load(x + row * stride + head * size + at, mask=inside, other=0).to(tl.float32)
    z = tl.load(gate + row * gate_stride + head * size + at, mask=inside, other=0).to(tl.float32)
    w = tl.load(weight + at, mask=at < size, other=0).to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(value * value, 1) / size + eps)
    y = value * scale[:, None] * w * (z / (1 + tl.exp(-z)))
    tl.store(out + (row * heads + head) * size + at, y.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dim() != 3 or x.shape != gate.shape or not _fits(x, gate, weight):
        return reference.gated_rms_norm(x, gate, weight, eps)
    rows, heads, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        block = _power(size)
        group = max(1024 // block, 1)
        _gated_rms_norm[(rows, -(-heads // group))](
            x, gate, weight, out, float(eps), x.stride(0), gate.stride(0), heads, size, group, block, pdl.enabled(),
            num_warps=4, **pdl.options(),
        )  # fmt: skip
    return out
