"""The operations of :mod:`mstar.nn.ops.delta` as Triton kernels. What a kernel does not take goes to the reference.

Where every row has one token, one launch does all of a layer's: a program takes one head's matrix, and computes the
convolution and the gates that it needs and the norm behind it. It reads states in one place and writes them to another,
so programs may share what they read. Longer rows are a launch for the convolution, two for the rule
(:mod:`mstar.nn.ops.cuda_delta_chunks`) and one for the norm.

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
from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

__all__ = ["causal_conv", "gated_delta_net", "gated_delta_rule", "gated_rms_norm"]

_WARP = 4096
"""Numbers of a matrix that a warp of a decoding step's program holds, 128 a thread. With fewer, there would be more
threads than channels, and Triton would load these anew in every layout that they are needed in."""
_CHANNELS = 256
_TOKENS = 16
"""Channels and tokens that one program convolves: what its tokens share is read once and stays near."""


# --- one token a row --------------------------------------------------------------------------------------------------
@triton.jit
def _convolved(row, weight, window, target, channel, mine, width: tl.constexpr, kept: tl.constexpr):
    """The convolution's new outputs of some channels, rounded to their dtype, in float32. With *kept* and *mine* the
    window that ends with this token is written to *target*."""
    new = tl.load(row + channel)
    total = new.to(tl.float32) * tl.load(weight + channel * width + width - 1).to(tl.float32)
    for tap in tl.static_range(width - 1):
        old = tl.load(window + channel * (width - 1) + tap)
        total += old.to(tl.float32) * tl.load(weight + channel * width + tap).to(tl.float32)
        if kept and tap > 0:
            tl.store(target + channel * (width - 1) + tap - 1, old, mask=mine)
    if kept:
        tl.store(target + channel * (width - 1) + width - 2, new.to(target.dtype.element_ty), mask=mine)
    return (total / (1 + tl.exp(-total))).to(new.dtype).to(tl.float32)


@triton.jit(
    do_not_specialize_on_alignment=[
        "a",
        "b",
        "offsets",
        "window_source",
        "window_target",
        "state_source",
        "state_target",
    ]
)
def _decode(
    mixed, a, b, weight, a_log, dt_bias, offsets, windows, window_source, window_target, states, state_source,
    state_target, gate, norm, out, eps, stride: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr,
    window_stride: tl.constexpr, state_stride: tl.constexpr, gate_stride: tl.constexpr, width: tl.constexpr,
    k_heads: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr,
    window_kept: tl.constexpr, state_kept: tl.constexpr, normed: tl.constexpr, single: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row.

    :param single: whether each row has one token; else programs of rows that have not do nothing.
    """
    group: tl.constexpr = v_heads // k_heads
    keys: tl.constexpr = k_heads * key
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = row
    if not single:
        token = tl.load(offsets + row)
        if tl.load(offsets + row + 1) != token + 1:
            return
    at_k = tl.arange(0, key)
    at_v = tl.arange(0, value)
    # The matrix is nearly all that is read. It is asked for first, and comes while the rest is computed.
    within = head * key * value + at_k[:, None] * value + at_v[None, :]
    s = tl.load(states + tl.load(state_source + row) * state_stride + within)
    q_channel = (head // group) * key + at_k
    source = mixed + token * stride
    window = windows + tl.load(window_source + row) * window_stride
    target = windows + tl.load(window_target + row) * window_stride
    mine = at_k * 0 + head % group == 0  # the first of the programs that share queries and keys
    q = _convolved(source, weight, window, target, q_channel, mine, width, window_kept)
    k = _convolved(source, weight, window, target, q_channel + keys, mine, width, window_kept)
    v = _convolved(source, weight, window, target, 2 * keys + head * value + at_v, at_v >= 0, width, window_kept)
    q = q * (1 / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6)) * (key**-0.5)
    k = k * (1 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
    g, beta = chunks.gates(
        tl.load(a + token * a_stride + head), tl.load(b + token * b_stride + head), tl.load(a_log + head),
        tl.load(dt_bias + head),
    )  # fmt: skip
    s = s.to(tl.float32) * tl.exp(g)
    new = (v - tl.sum(s * k[:, None], 0)) * beta
    s += k[:, None] * new[None, :]
    if state_kept:
        kept = states + tl.load(state_target + row) * state_stride + within
        tl.store(kept, s.to(states.dtype.element_ty))
    o = tl.sum(s * q[:, None], 0)
    if normed:
        z = tl.load(gate + token * gate_stride + head * value + at_v).to(tl.float32)
        o = o * (1 / tl.sqrt_rn(tl.sum(o * o, 0) / value + eps)) * tl.load(norm + at_v).to(tl.float32)
        o = o * (z / (1 + tl.exp(-z)))
    tl.store(out + (token * v_heads + head) * value + at_v, o.to(out.dtype.element_ty))


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
    norm: GatedNorm | None = None,
) -> Tensor:
    _, v_heads, key, value = state.pool.shape
    keys = (mixed.shape[1] - v_heads * value) // 2
    fits = _fits(mixed, a, b, conv_weight, a_log, dt_bias, window.pool, state.pool) and chunks.takes(state.pool)
    fits = fits and (spans.single or chunks.takes_rows(mixed)) and (norm is None or _fits(norm.gate, norm.weight))
    if not fits or conv_weight.shape[1] < 2:
        return reference.gated_delta_net(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm)
    if spans.single:
        out = mixed.new_empty((spans.rows, v_heads, value))
        _step(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm, out)
        return out
    taken = causal_conv(mixed, conv_weight, None, spans, window)
    q, k = (each.unflatten(1, (-1, key)) for each in (taken[:, :keys], taken[:, keys : 2 * keys]))
    v = taken[:, 2 * keys :].unflatten(1, (v_heads, value))
    among = spans.rows > 1  # rows of one token, perhaps, for which a chunk's work is many times too much
    out = chunks.rule(q, k, v, a, b, a_log, dt_bias, spans, state, longer=among)
    if among:
        _step(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, None, out)
    return out if norm is None else gated_rms_norm(out, *norm)


def _step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    spans: Spans,
    window: StateSlots,
    state: StateSlots,
    norm: GatedNorm | None,
    out: Tensor,
) -> None:
    """What *out* is to be for rows of one token."""
    _, v_heads, key, value = state.pool.shape
    gate, scale, eps = (mixed, mixed, 0.0) if norm is None else norm
    if not spans.rows:
        return
    k_heads = (mixed.shape[1] - v_heads * value) // (2 * key)
    _decode[(spans.rows, v_heads)](
        mixed, a, b, conv_weight, a_log, dt_bias, spans.offsets, window.pool, window.source, _or_source(window),
        state.pool, state.source, _or_source(state), gate, scale, out, float(eps), mixed.stride(0), a.stride(0),
        b.stride(0), window.pool.stride(0), state.pool.stride(0), gate.stride(0), conv_weight.shape[1], k_heads,
        v_heads, key, value, window.target is not None, state.target is not None, norm is not None, spans.single,
        pdl.enabled(), num_warps=max(key * value // _WARP, 1), **pdl.options(),
    )  # fmt: skip


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
@triton.jit
def _tile(
    x, weight, bias, windows, source, row_of, offsets, out, tokens, number, channel, stride: tl.constexpr,
    window_stride: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, biased: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    """The outputs of *together* tokens, from the one that *number* says on."""
    before: tl.constexpr = width - 1
    inside = (channel < channels)[None, :]
    token = number.to(tl.int64) * together + tl.arange(0, together)
    real = token < tokens
    row = tl.load(row_of + token, mask=real, other=0)
    position = tl.where(real, token - tl.load(offsets + row), before)
    begins = tl.min(position) < before  # some row does: its first tokens need the window before it
    window = windows + tl.load(source + row) * window_stride
    total = tl.zeros((together, channel.shape[0]), tl.float32)
    if biased:
        total += tl.load(bias + channel, mask=channel < channels, other=0).to(tl.float32)[None, :]
    for tap in tl.static_range(width):
        at = position + tap - before  # in the row; the window lies before it
        own = x + (token + tap - before)[:, None] * stride + channel[None, :]
        value = tl.load(own, mask=(real & (at >= 0))[:, None] & inside, other=0).to(tl.float32)
        if begins:
            old = window[:, None] + channel[None, :] * before + (at + before)[:, None]
            value += tl.load(old, mask=(at < 0)[:, None] & inside, other=0).to(tl.float32)
        total += (
            value * tl.load(weight + channel * width + tap, mask=channel < channels, other=0).to(tl.float32)[None, :]
        )
    y = total / (1 + tl.exp(-total))
    place = out + token[:, None] * channels + channel[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=real[:, None] & inside)


@triton.jit
def _next_window(
    x, windows, source, target, offsets, row, channel, stride: tl.constexpr, window_stride: tl.constexpr,
    channels: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """What a row's last tokens leave to the next step."""
    before: tl.constexpr = width - 1
    inside = channel < channels
    end = tl.load(offsets + row + 1)
    length = end - tl.load(offsets + row)
    window = windows + tl.load(source + row) * window_stride + channel * before
    next_window = windows + tl.load(target + row) * window_stride + channel * before
    for tap in tl.static_range(before):
        at = length + tap - before + channel * 0
        own = tl.load(x + (end + tap - before) * stride + channel, mask=inside & (at >= 0), other=0)
        old = tl.load(window + at + before, mask=inside & (at < 0), other=0)
        tl.store(next_window + tap, own.to(windows.dtype.element_ty) + old, mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["source", "target", "row_of", "offsets"])
def _conv(
    x, weight, bias, windows, source, target, row_of, offsets, out, tokens, stride: tl.constexpr,
    window_stride: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, biased: tl.constexpr,
    kept: tl.constexpr, together: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """The first programs compute *together* of all *tokens* each, the others write a row's window."""
    pdl.begin(early)
    tiles = tl.cdiv(tokens, together)
    number = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    if number < tiles:
        _tile(
            x, weight, bias, windows, source, row_of, offsets, out, tokens, number, channel, stride, window_stride,
            channels, width, biased, together,
        )  # fmt: skip
    elif kept:
        row = number - tiles
        _next_window(x, windows, source, target, offsets, row, channel, stride, window_stride, channels, width)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, spans: Spans, window: StateSlots) -> Tensor:
    channels, width = weight.shape
    known = _fits(x, weight, window.pool) and (bias is None or _known(bias))
    if not known or width < 2:
        return reference.causal_conv(x, weight, bias, spans, window)
    out = x.new_empty((spans.tokens, channels))
    block = min(_power(channels), _CHANNELS)
    rows = spans.rows if window.target is not None else 0
    if spans.tokens + rows:
        _conv[(-(-spans.tokens // _TOKENS) + rows, -(-channels // block))](
            x, weight, x if bias is None else bias, window.pool, window.source, _or_source(window), spans.row_of,
            spans.offsets, out, spans.tokens, x.stride(0), window.pool.stride(0), channels, width, bias is not None,
            window.target is not None, _TOKENS, block, pdl.enabled(), num_warps=4, **pdl.options(),
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
