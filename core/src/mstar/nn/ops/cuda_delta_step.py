"""A decoding step of gated delta nets as one Triton kernel: what lies between a layer's projections, for rows of one
token.

A matrix is 64 kB in float32, read and written once, and nearly all that a step moves. So what counts is that reads and
writes of some matrices are under way while others are computed. A program holds a whole one in its registers: in
pieces, or asked for twice, matrices come slower. :class:`Way` has the ways to divide them that
``benchmarks/gpu_delta_rule.py --parts sweep`` compares; :func:`way_for` chooses one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import ahead, pdl
from mstar.nn.ops.cuda_attention import _processors
from mstar.nn.ops.cuda_delta_chunks import gates
from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

__all__ = ["Way", "or_source", "step", "way_for"]

_WARP = 4096
"""Numbers of a matrix that a warp holds, 128 a thread. With fewer, there would be more threads than channels, and
Triton would load these anew in every layout that they are needed in."""


class Way(NamedTuple):
    """How a step's matrices are divided among programs and threads."""

    warps: int
    groups: int = 1
    """Groups of columns that a thread has columns of: with more, it has fewer rows, and so less of keys and queries."""
    registers: int = 0
    """The most of a thread; 0: what the compiler likes."""
    resident: int = 0
    """Programs of a multiprocessor that take a head of one row after the other; 0: each matrix has one of its own."""
    stages: int = 1
    """Of a resident program: from 2 on the next matrices are on their way into shared memory while one is computed."""


_WAYS = ((None, Way(4, 4)),)
"""Of matrices ``[128, 128]``: up to so many in a step, a way."""


@triton.jit
def _weights(weight, channel, width: tl.constexpr):
    """The convolution's of some channels, the newest token's last."""
    found = ()
    for tap in tl.static_range(width):
        found += (tl.load(weight + channel * width + tap),)  # type: ignore[assignment]
    return found


@triton.jit
def _inputs(source, window, channel, width: tl.constexpr):
    """The last inputs of some channels, oldest first."""
    found = ()
    for tap in tl.static_range(width - 1):
        found += (tl.load(window + channel * (width - 1) + tap),)  # type: ignore[assignment]
    found += (tl.load(source + channel),)  # type: ignore[assignment]
    return found


@triton.jit
def _convolved(inputs, weights, width: tl.constexpr):
    """The convolution's new outputs, rounded to their dtype, in float32."""
    total = inputs[width - 1].to(tl.float32) * weights[width - 1].to(tl.float32)
    for tap in tl.static_range(width - 1):
        total += inputs[tap].to(tl.float32) * weights[tap].to(tl.float32)
    return (total / (1 + tl.exp(-total))).to(inputs[width - 1].dtype).to(tl.float32)


@triton.jit
def _shift(target, inputs, channel, behind, width: tl.constexpr):
    """Store the window that ends with this token, of the channels before *behind*. (A number, since Triton 3.9's
    interpreter makes numbers of a block of truth values and one of them.)"""
    for tap in tl.static_range(1, width):
        place = target + channel * (width - 1) + tap - 1
        tl.store(place, inputs[tap].to(target.dtype.element_ty), mask=channel < behind)


@triton.jit
def _matrix(
    mixed, a, b, q_weights, k_weights, v_weights, log, bias, windows, window_source, window_target, states,
    state_source, state_target, gate, scale, out, eps, row, token, head, stride: tl.constexpr, a_stride: tl.constexpr,
    b_stride: tl.constexpr, window_stride: tl.constexpr, state_stride: tl.constexpr, gate_stride: tl.constexpr,
    width: tl.constexpr, k_heads: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr,
    groups: tl.constexpr, window_kept: tl.constexpr, state_kept: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """One head of one row. What is small is asked for before the matrix, and computed while that comes."""
    group: tl.constexpr = v_heads // k_heads
    keys: tl.constexpr = k_heads * key
    columns: tl.constexpr = value // groups
    state = states + tl.load(state_source + row) * state_stride
    window = windows + tl.load(window_source + row) * window_stride
    kept, target = state, window
    if state_kept:
        kept = states + tl.load(state_target + row) * state_stride
    if window_kept:
        target = windows + tl.load(window_target + row) * window_stride
    source = mixed + token * stride
    at_k = tl.arange(0, key)
    at_v = tl.arange(0, groups)[:, None] * columns + tl.arange(0, columns)[None, :]
    q_channel = (head // group) * key + at_k
    k_channel = q_channel + keys
    v_channel = 2 * keys + head * value + at_v
    q_in = _inputs(source, window, q_channel, width)
    k_in = _inputs(source, window, k_channel, width)
    v_in = _inputs(source, window, v_channel, width)
    if normed:
        z = tl.load(gate + token * gate_stride + head * value + at_v)
    g, beta = tl.load(a + token * a_stride + head), tl.load(b + token * b_stride + head)
    within = head * key * value + at_k[None, :, None] * value + at_v[:, None, :]
    s = tl.load(state + within)
    g, beta = gates(g, beta, log, bias)
    q, k, v = _convolved(q_in, q_weights, width), _convolved(k_in, k_weights, width), _convolved(v_in, v_weights, width)
    q = q * (1 / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6)) * (key**-0.5)
    k = k * (1 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
    along = tl.sum(q * k, 0)
    q, k = q[None, :, None], k[None, :, None]
    s = s.to(tl.float32) * tl.exp(g)
    # What the query sees of the new matrix is what it sees of the old one and of what is added to that: both sums over
    # the matrix are taken at once.
    new = (v - tl.sum(s * k, 1)) * beta
    o = tl.sum(s * q, 1) + along * new
    if state_kept:
        tl.store(kept + within, (s + k * new[:, None, :]).to(states.dtype.element_ty))
    if normed:
        o = o * (1 / tl.sqrt_rn(tl.sum(tl.sum(o * o, 1), 0) / value + eps)) * scale
        z = z.to(tl.float32)
        o = o * (z / (1 + tl.exp(-z)))
    tl.store(out + (token * v_heads + head) * value + at_v, o.to(out.dtype.element_ty))
    if window_kept:
        channels: tl.constexpr = 2 * keys + v_heads * value
        shared = tl.where(head % group == 0, channels, 0)  # the first of the programs that share queries and keys
        _shift(target, q_in, q_channel, shared, width)
        _shift(target, k_in, k_channel, shared, width)
        _shift(target, v_in, v_channel, channels, width)


@triton.jit(
    do_not_specialize=["rows", "asking", *ahead.ARGUMENTS[1:]],
    do_not_specialize_on_alignment=[
        ahead.ARGUMENTS[0],
        "a",
        "b",
        "offsets",
        "window_source",
        "window_target",
        "state_source",
        "state_target",
    ],
)
def _delta_step(
    mixed, a, b, weight, a_log, dt_bias, offsets, windows, window_source, window_target, states, state_source,
    state_target, gate, norm, out, eps, rows, asking, next_weight, next_lines, next_of_row, next_of_part, next_row,
    next_part, stride: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr,
    window_stride: tl.constexpr, state_stride: tl.constexpr, gate_stride: tl.constexpr, width: tl.constexpr,
    k_heads: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr, groups: tl.constexpr,
    window_kept: tl.constexpr, state_kept: tl.constexpr, normed: tl.constexpr, single: tl.constexpr,
    resident: tl.constexpr, stages: tl.constexpr, turn: tl.constexpr, line: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row, or with *resident* of one row after the other.

    :param asking: how many programs, the last ones, ask for *turn* lines each of what comes next when they have ended.
    :param single: whether each row has one token, as it must have with *resident*; else programs of rows that have not
        do nothing.
    """
    keys: tl.constexpr = k_heads * key
    columns: tl.constexpr = value // groups
    pdl.begin(early)
    head = tl.program_id(0)
    at_k = tl.arange(0, key)
    at_v = tl.arange(0, groups)[:, None] * columns + tl.arange(0, columns)[None, :]
    q_channel = (head // (v_heads // k_heads)) * key + at_k
    q_weights = _weights(weight, q_channel, width)
    k_weights = _weights(weight, q_channel + keys, width)
    v_weights = _weights(weight, 2 * keys + head * value + at_v, width)
    log, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    scale = at_v
    if normed:
        scale = tl.load(norm + at_v).to(tl.float32)
    if resident:
        for number in tl.range(tl.program_id(1), rows, tl.num_programs(1), num_stages=stages):
            row = tl.cast(number, tl.int64)
            _matrix(
                mixed, a, b, q_weights, k_weights, v_weights, log, bias, windows, window_source, window_target, states,
                state_source, state_target, gate, scale, out, eps, row, row, head, stride, a_stride, b_stride,
                window_stride, state_stride, gate_stride, width, k_heads, v_heads, key, value, groups, window_kept,
                state_kept, normed,
            )  # fmt: skip
    else:
        row = tl.program_id(1).to(tl.int64)
        token = row
        if not single:
            token = tl.load(offsets + row)
            if tl.load(offsets + row + 1) != token + 1:
                return
        _matrix(
            mixed, a, b, q_weights, k_weights, v_weights, log, bias, windows, window_source, window_target, states,
            state_source, state_target, gate, scale, out, eps, row, token, head, stride, a_stride, b_stride,
            window_stride, state_stride, gate_stride, width, k_heads, v_heads, key, value, groups, window_kept,
            state_kept, normed,
        )  # fmt: skip
        if turn:
            number = tl.program_id(1) * v_heads + head - (rows * v_heads - asking)
            if number >= 0:
                ahead.fetch(next_weight, number, next_lines, next_of_row, next_of_part, next_row, next_part, turn, line)


def step(
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
    way: Way | None = None,
    following: Tensor | None = None,
) -> None:
    """What *out* ``[tokens, v_heads, V]`` is to be for rows of one token, as
    :func:`mstar.nn.ops.delta.gated_delta_net` says.

    :param way: another one than :func:`way_for` chooses. :param following: the weight of the product that comes next,
        which the last programs ask for when their heads are done and memory has less to do.
    """
    if not spans.rows:
        return
    _, v_heads, key, value = state.pool.shape
    gate, scale, eps = (mixed, mixed, 0.0) if norm is None else norm
    k_heads = (mixed.shape[1] - v_heads * value) // (2 * key)
    way = way or way_for(spans.rows * v_heads, key, value)
    resident = way.resident if spans.single else 0
    programs = spans.rows
    if resident:
        programs = min(max(resident * _processors(state.pool.device) // v_heads, 1), spans.rows)
    asked = None if resident else ahead.plan(following, spans.rows)
    asking = 0 if asked is None else min(asked.programs(way.warps), spans.rows * v_heads)
    options = {"num_warps": way.warps, **pdl.options()}
    if way.registers and state.pool.is_cuda:
        options["maxnreg"] = way.registers
    _delta_step[(v_heads, programs)](
        mixed, a, b, conv_weight, a_log, dt_bias, spans.offsets, window.pool, window.source, or_source(window),
        state.pool, state.source, or_source(state), gate, scale, out, float(eps), spans.rows, asking,
        *(asked or ahead.nothing(mixed)), mixed.stride(0), a.stride(0), b.stride(0), window.pool.stride(0),
        state.pool.stride(0), gate.stride(0), conv_weight.shape[1], k_heads, v_heads, key, value,
        min(way.groups, value // 16), window.target is not None, state.target is not None, norm is not None,
        spans.single, resident > 0, way.stages,
        ahead.lines_of(way.warps) if asking else 0, ahead.LINE, pdl.enabled(), **options,
    )  # fmt: skip


def way_for(matrices: int, key: int, value: int) -> Way:
    """How a step of so many *matrices* ``[key, value]`` is divided."""
    if key == value == 128:
        return next(way for most, way in _WAYS if most is None or matrices <= most)
    return Way(max(key * value // _WARP, 1))


def or_source(slots: StateSlots) -> Tensor:
    """Where the next state goes; a tensor that is not used, where it is not kept."""
    return slots.source if slots.target is None else slots.target
