"""The operations of :mod:`mstar.nn.ops.delta` as Triton kernels. What a kernel does not take goes to the reference.

Where every row has one token, one launch does all of a layer's (:mod:`mstar.nn.ops.cuda_delta_step`). It reads states
in one place and writes them to another, so programs may share what they read. Longer rows are a launch for the
convolution, two for the rule (:mod:`mstar.nn.ops.cuda_delta_chunks`) and one for the norm.

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
from mstar.nn.ops.cuda_delta_step import or_source, step
from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

__all__ = ["causal_conv", "gated_delta_net", "gated_delta_rule", "gated_rms_norm"]

_CHANNELS = 256
_TOKENS = 16
"""Channels and tokens that one program convolves: what its tokens share is read once and stays near."""


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
    following: Tensor | None = None,
) -> Tensor:
    _, v_heads, key, value = state.pool.shape
    keys = (mixed.shape[1] - v_heads * value) // 2
    fits = _fits(mixed, a, b, conv_weight, a_log, dt_bias, window.pool, state.pool) and chunks.takes(state.pool)
    fits = fits and (spans.single or chunks.takes_rows(mixed)) and (norm is None or _fits(norm.gate, norm.weight))
    if not fits or conv_weight.shape[1] < 2:
        return reference.gated_delta_net(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm)
    if spans.single:
        out = mixed.new_empty((spans.rows, v_heads, value))
        step(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm, out, following=following)
        return out
    taken = causal_conv(mixed, conv_weight, None, spans, window)
    q, k = (each.unflatten(1, (-1, key)) for each in (taken[:, :keys], taken[:, keys : 2 * keys]))
    v = taken[:, 2 * keys :].unflatten(1, (v_heads, value))
    among = spans.rows > 1  # rows of one token, perhaps, for which a chunk's work is many times too much
    out = chunks.rule(q, k, v, a, b, a_log, dt_bias, spans, state, longer=among)
    if among:
        step(mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, None, out)
    return out if norm is None else gated_rms_norm(out, *norm)


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


# --- the convolution of rows of any length ----------------------------------------------------------------------------
@triton.jit
def _tile(
    x, weight, bias, windows, source, row_of, offsets, out, tokens, number, channel, stride: tl.constexpr,
    window_stride: tl.constexpr, channels: tl.constexpr, width: tl.constexpr, biased: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    """The outputs of *together* tokens of any rows, from the one that *number* says on."""
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
def _stretch(
    x, weight, bias, out, tokens, first, channel, stride: tl.constexpr, channels: tl.constexpr, width: tl.constexpr,
    biased: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """The same within one row and away from its begin: each input is read once."""
    inside = channel < channels
    inputs, weights = (), ()
    for tap in tl.static_range(width):
        taken = tl.load(weight + channel * width + tap, mask=inside, other=0).to(tl.float32)
        weights += (taken,)  # type: ignore[assignment]
    for number in tl.static_range(width - 1 + together):
        at = first + number - (width - 1)
        # a number: Triton 3.9's interpreter makes numbers of a block of truth values and one of them
        taken = tl.load(x + at * stride + channel, mask=channel < tl.where(at < tokens, channels, 0), other=0)
        inputs += (taken,)  # type: ignore[assignment]
    for number in tl.static_range(together):
        total = tl.zeros(channel.shape, tl.float32)
        if biased:
            total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
        for tap in tl.static_range(width):
            total += inputs[number + tap].to(tl.float32) * weights[tap]
        y = total / (1 + tl.exp(-total))
        place = out + (first + number) * channels + channel
        tl.store(place, y.to(out.dtype.element_ty), mask=channel < tl.where(first + number < tokens, channels, 0))


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
        first = number.to(tl.int64) * together
        own = tl.load(row_of + first)
        one = tl.load(row_of + tl.minimum(first + together, tokens) - 1) == own
        if one & (first - tl.load(offsets + own) >= width - 1):
            _stretch(x, weight, bias, out, tokens, first, channel, stride, channels, width, biased, together)
        else:
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
            x, weight, x if bias is None else bias, window.pool, window.source, or_source(window), spans.row_of,
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
