"""A decoding step of gated delta nets as one Triton kernel: what lies between a layer's projections, for rows of one
token.

A matrix is 64 kB in float32, read and written once, and nearly all that a step moves. So what counts is that reads and
writes of some matrices are under way while others are computed. :class:`Way` has the ways to divide the work that
``benchmarks/gpu_delta_rule.py --parts sweep`` compares; :func:`way_for` chooses one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl
from mstar.nn.ops.cuda_delta_chunks import gates
from mstar.nn.ops.delta import GatedNorm, Spans, StateSlots

__all__ = ["Way", "launch", "or_source", "step", "way_for"]

_WARP = 4096
"""Numbers of a matrix that a warp holds, 128 a thread. With fewer, there would be more threads than channels, and
Triton would load these anew in every layout that they are needed in."""


class Way(NamedTuple):
    """How a matrix is taken through a program."""

    columns: int
    """Of a matrix, that are computed and stored at a time; fewer, where a matrix has not as many."""
    warps: int
    stages: int = 1
    """From 2 on, groups of columns come through shared memory: one is computed, the others are on their way."""
    once: bool = False
    """Whether caches are told that nobody reads a matrix again before the next step."""
    ahead: bool = False
    """Whether the whole matrix is asked for, into the second cache, before anything is computed (on a GPU)."""


_WAYS = ((4 * 32, Way(128, 8, ahead=True)), (None, Way(32, 4, 3, ahead=True)))
"""Of matrices ``[128, 128]``: up to so many in a step, a way. With few, nothing but a program's own latency counts."""


@triton.jit
def _ask(place, size: tl.constexpr):
    """Have *size* bytes from *place* on brought into the second cache; nothing waits for them."""
    line = place.to(tl.int64) + tl.arange(0, size // 128) * 128
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], tl.int32, False, 1)


@triton.jit
def _around(source, weight, window, channel, width: tl.constexpr):
    """The last inputs of some channels, oldest first, and their weights."""
    inputs, weights = (), ()
    for tap in tl.static_range(width - 1):
        inputs += (tl.load(window + channel * (width - 1) + tap),)  # type: ignore[assignment]
    inputs += (tl.load(source + channel),)  # type: ignore[assignment]
    for tap in tl.static_range(width):
        weights += (tl.load(weight + channel * width + tap),)  # type: ignore[assignment]
    return inputs, weights


@triton.jit
def _convolved(inputs, weights, width: tl.constexpr):
    """The convolution's new outputs, rounded to their dtype, in float32."""
    total = inputs[width - 1].to(tl.float32) * weights[width - 1].to(tl.float32)
    for tap in tl.static_range(width - 1):
        total += inputs[tap].to(tl.float32) * weights[tap].to(tl.float32)
    return (total / (1 + tl.exp(-total))).to(inputs[width - 1].dtype).to(tl.float32)


@triton.jit
def _shift(target, inputs, channel, mine, width: tl.constexpr):
    """Store the window that ends with this token."""
    for tap in tl.static_range(1, width):
        place = target + channel * (width - 1) + tap - 1
        tl.store(place, inputs[tap].to(target.dtype.element_ty), mask=(channel >= 0) & mine)


@triton.jit(
    do_not_specialize_on_alignment=[
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
    state_target, gate, norm, out, eps, stride: tl.constexpr, a_stride: tl.constexpr, b_stride: tl.constexpr,
    window_stride: tl.constexpr, state_stride: tl.constexpr, gate_stride: tl.constexpr, width: tl.constexpr,
    k_heads: tl.constexpr, v_heads: tl.constexpr, key: tl.constexpr, value: tl.constexpr,
    columns: tl.constexpr, window_kept: tl.constexpr, state_kept: tl.constexpr, normed: tl.constexpr,
    single: tl.constexpr, stages: tl.constexpr, once: tl.constexpr, ahead: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row, *columns* columns of its matrix after the others.

    :param single: whether each row has one token; else programs of rows that have not do nothing.
    :param ahead: see :class:`Way`.
    """
    group: tl.constexpr = v_heads // k_heads
    keys: tl.constexpr = k_heads * key
    tiles: tl.constexpr = value // columns
    policy: tl.constexpr = "evict_first" if once else ""
    pdl.begin(early)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = row
    if not single:
        token = tl.load(offsets + row)
        if tl.load(offsets + row + 1) != token + 1:
            return
    # What is small is asked for at once, and computed while the matrix comes.
    state = states + tl.load(state_source + row) * state_stride + head * key * value
    if ahead:
        _ask(state, key * value * (states.dtype.element_ty.primitive_bitwidth // 8))
    window = windows + tl.load(window_source + row) * window_stride
    kept, target = state, window
    if state_kept:
        kept = states + tl.load(state_target + row) * state_stride + head * key * value
    if window_kept:
        target = windows + tl.load(window_target + row) * window_stride
    source = mixed + token * stride
    at_k = tl.arange(0, key)
    at_tile, at_column = tl.arange(0, tiles)[:, None], tl.arange(0, columns)[None, :]
    place = at_tile * columns + at_column
    q_channel = (head // group) * key + at_k
    k_channel = q_channel + keys
    v_channel = 2 * keys + head * value + place
    q_in, q_weights = _around(source, weight, window, q_channel, width)
    k_in, k_weights = _around(source, weight, window, k_channel, width)
    v_in, v_weights = _around(source, weight, window, v_channel, width)
    if normed:
        z, scale = tl.load(gate + token * gate_stride + head * value + place), tl.load(norm + place)
    g, beta = gates(
        tl.load(a + token * a_stride + head), tl.load(b + token * b_stride + head), tl.load(a_log + head),
        tl.load(dt_bias + head),
    )  # fmt: skip
    left = tl.exp(g)
    q, k, v = _convolved(q_in, q_weights, width), _convolved(k_in, k_weights, width), _convolved(v_in, v_weights, width)
    q = q * (1 / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6)) * (key**-0.5)
    k = k * (1 / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6))
    along = tl.sum(q * k, 0)
    within = at_k[:, None] * value + at_column
    o = tl.zeros((tiles, columns), tl.float32)
    for tile in tl.range(tiles, num_stages=stages):
        s = tl.load(state + within + tile * columns, eviction_policy=policy).to(tl.float32) * left
        # What the query sees of the new matrix is what it sees of the old one and of what is added to that: both sums
        # over the matrix are taken at once.
        new = (tl.sum(tl.where(at_tile == tile, v, 0.0), 0) - tl.sum(s * k[:, None], 0)) * beta
        seen = tl.sum(s * q[:, None], 0) + along * new
        if state_kept:
            s += k[:, None] * new[None, :]
            tl.store(kept + within + tile * columns, s.to(states.dtype.element_ty), eviction_policy=policy)
        o = tl.where(at_tile == tile, seen[None, :], o)
    if normed:
        o = o * (1 / tl.sqrt_rn(tl.sum(tl.sum(o * o, 1), 0) / value + eps)) * scale.to(tl.float32)
        z = z.to(tl.float32)
        o = o * (z / (1 + tl.exp(-z)))
    tl.store(out + (token * v_heads + head) * value + place, o.to(out.dtype.element_ty))
    if window_kept:
        first = head % group == 0  # of the programs that share queries and keys
        _shift(target, q_in, q_channel, first, width)
        _shift(target, k_in, k_channel, first, width)
        _shift(target, v_in, v_channel, True, width)


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
) -> None:
    """What *out* ``[tokens, v_heads, V]`` is to be for rows of one token, as
    :func:`mstar.nn.ops.delta.gated_delta_net` says.

    :param way: another one than :func:`way_for` chooses.
    """
    if spans.rows:
        grid, arguments, options = launch(
            mixed, a, b, conv_weight, a_log, dt_bias, spans, window, state, norm, out, way
        )
        _delta_step[grid](*arguments, **options)


def launch(
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
) -> tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and options of the kernel that :func:`step` starts."""
    _, v_heads, key, value = state.pool.shape
    gate, scale, eps = (mixed, mixed, 0.0) if norm is None else norm
    k_heads = (mixed.shape[1] - v_heads * value) // (2 * key)
    way = way or way_for(spans.rows * v_heads, key, value)
    arguments = (
        mixed, a, b, conv_weight, a_log, dt_bias, spans.offsets, window.pool, window.source, or_source(window),
        state.pool, state.source, or_source(state), gate, scale, out, float(eps), mixed.stride(0), a.stride(0),
        b.stride(0), window.pool.stride(0), state.pool.stride(0), gate.stride(0), conv_weight.shape[1], k_heads,
        v_heads, key, value, min(way.columns, value), window.target is not None, state.target is not None,
        norm is not None, spans.single, way.stages, way.once, way.ahead and state.pool.is_cuda, pdl.enabled(),
    )  # fmt: skip
    return (v_heads, spans.rows), arguments, {"num_warps": way.warps, **pdl.options()}


def way_for(matrices: int, key: int, value: int) -> Way:
    """How a step of so many *matrices* ``[key, value]`` is divided."""
    if key == value == 128:
        return next(way for most, way in _WAYS if most is None or matrices <= most)
    return Way(value, max(key * value // _WARP, 1))


def or_source(slots: StateSlots) -> Tensor:
    """Where the next state goes; a tensor that is not used, where it is not kept."""
    return slots.source if slots.target is None else slots.target
