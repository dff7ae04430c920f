"""Adaptive instance norm and the activation after it as numba kernels, two passes over memory instead of nine; and the
sums before and after the halves of a fast convolution, in one pass each.

For float32 and bfloat16 in memory; arithmetic is float32. A row is cut into blocks of frames that do not depend on
what is beside it, so it gives the same in any batch and on any number of threads. Importing this module compiles the
kernels, or loads them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.nn.ops.jit import claim, function, kernel, narrow, view, widen

__all__ = ["adain", "merge", "split"]

_BLOCK = 64
"""Frames of a work item."""
_SHARED = 1 << 15
"""Elements from which on several threads are worth waking."""
_EPS = 1e-5


@function
def _moments(block, dtype):  # type: ignore[no-untyped-def]
    """Per block of frames and channel: the sums of what its values differ from the row's first ones, and of the
    squares; over valid frames."""
    args = view(block, 8, np.int64)
    rows, length, channels, blocks = args[4], args[5], args[6], args[7]
    x, lengths = view(args[1], rows * length * channels, dtype), view(args[2], rows, np.int64)
    sums = view(args[3], rows * blocks * 2 * channels, np.float32)
    item = claim(block, 1)
    while item < rows * blocks:
        row, part = item // blocks, item % blocks
        first, second = sums[2 * item * channels : (2 * item + 1) * channels], sums[(2 * item + 1) * channels :]
        for c in range(channels):
            first[c] = np.float32(0)
            second[c] = np.float32(0)
        pivot = x[row * length * channels : (row * length + 1) * channels]
        for t in range(part * _BLOCK, min((part + 1) * _BLOCK, lengths[row])):
            frame = x[(row * length + t) * channels : (row * length + t + 1) * channels]
            for c in range(channels):
                d = widen(frame[c]) - widen(pivot[c])
                first[c] += d
                second[c] += d * d
        item = claim(block, 1)


@function
def _sine(r):  # type: ignore[no-untyped-def]
    """Of float32 *r* within ±π/2: the Taylor polynomial of degree 13, whose remainder is below float32's precision."""
    s = r * r
    p = np.float32(1.6059043836821613e-10)
    p = p * s + np.float32(-2.505210838544172e-08)
    p = p * s + np.float32(2.7557319223985893e-06)
    p = p * s + np.float32(-1.984126984126984e-04)
    p = p * s + np.float32(8.333333333333333e-03)
    p = p * s + np.float32(-0.16666666666666666)
    return r + r * s * p


@function
def _apply(block, dtype, snake):  # type: ignore[no-untyped-def]
    """Multiply, add, activate; zeros beyond the rows' lengths."""
    args = view(block, 12, np.int64)
    rows, length, channels, blocks = args[8], args[9], args[10], args[11]
    x, out = view(args[1], rows * length * channels, dtype), view(args[2], rows * length * channels, dtype)
    lengths = view(args[3], rows, np.int64)
    scales, shifts = view(args[4], rows * channels, np.float32), view(args[5], rows * channels, np.float32)
    alpha, means = view(args[6], 2 * channels, np.float32), view(args[7], rows * channels, np.float32)
    item = claim(block, 1)
    while item < rows * blocks:
        row, part = item // blocks, item % blocks
        mean, scale = means[row * channels : (row + 1) * channels], scales[row * channels : (row + 1) * channels]
        shift = shifts[row * channels : (row + 1) * channels]
        end = min((part + 1) * _BLOCK, length)
        for t in range(part * _BLOCK, min(end, lengths[row])):
            base = (row * length + t) * channels
            frame, y = x[base : base + channels], out[base : base + channels]
            if snake:
                slope, share = alpha[:channels], alpha[channels:]
                for c in range(channels):
                    v = (widen(frame[c]) - mean[c]) * scale[c] + shift[c]
                    z = v * slope[c]
                    turns = z * np.float32(0.3183098861837907)
                    half = np.float32(0.5) if turns >= np.float32(0) else np.float32(-0.5)
                    n = np.float32(np.int32(turns + half))
                    s = _sine(z - n * np.float32(3.1415926535897931))
                    y[c] = narrow(v + share[c] * s * s, y[c])
            else:
                for c in range(channels):
                    v = (widen(frame[c]) - mean[c]) * scale[c] + shift[c]
                    y[c] = narrow(v if v >= np.float32(0) else v * np.float32(0.2), y[c])
        for i in range((row * length + max(part * _BLOCK, lengths[row])) * channels, (row * length + end) * channels):
            out[i] = narrow(np.float32(0), out[i])
        item = claim(block, 1)


@function
def _split(block):  # type: ignore[no-untyped-def]
    args = view(block, 10, np.int64)
    rows, length, channels, padding, reach, ahead = args[4], args[5], args[6], args[7], args[8], args[9]
    x = view(args[1], rows * length * channels, np.float32)
    size = rows * reach * channels
    even, odd, both = (
        view(args[2], size, np.float32),
        view(args[2] + 4 * size, size, np.float32),
        view(args[3], size, np.float32),
    )
    blocks = (reach + _BLOCK - 1) // _BLOCK
    item = claim(block, 1)
    while item < rows * blocks:
        row, part = item // blocks, item % blocks
        for u in range(part * _BLOCK, min((part + 1) * _BLOCK, reach)):
            base = (row * reach + u) * channels
            e, o, b = even[base : base + channels], odd[base : base + channels], both[base : base + channels]
            first, second, third = 2 * u - padding, 2 * u + 1 - padding, 2 * (u + ahead) - padding
            for c in range(channels):
                e[c] = np.float32(0)
                o[c] = np.float32(0)
            if 0 <= first < length:
                frame = x[(row * length + first) * channels : (row * length + first + 1) * channels]
                for c in range(channels):
                    e[c] = frame[c]
            if 0 <= second < length:
                frame = x[(row * length + second) * channels : (row * length + second + 1) * channels]
                for c in range(channels):
                    o[c] = frame[c]
            if 0 <= third < length:
                frame = x[(row * length + third) * channels : (row * length + third + 1) * channels]
                for c in range(channels):
                    b[c] = o[c] + frame[c]
            else:
                for c in range(channels):
                    b[c] = o[c]
        item = claim(block, 1)


@function
def _merge(block):  # type: ignore[no-untyped-def]
    args = view(block, 11, np.int64)
    rows, count, half, ahead, channels, shift = args[6], args[7], args[8], args[9], args[10], args[9] - args[8] - 1
    evens, odds = view(args[1], rows * ahead * channels, np.float32), view(args[2], rows * ahead * channels, np.float32)
    boths, out = view(args[3], rows * half * channels, np.float32), view(args[4], rows * count * channels, np.float32)
    bias = view(args[5], channels, np.float32)
    blocks = (half + _BLOCK - 1) // _BLOCK
    item = claim(block, 1)
    while item < rows * blocks:
        row, part = item // blocks, item % blocks
        for u in range(part * _BLOCK, min((part + 1) * _BLOCK, half)):
            base = (row * ahead + u) * channels
            e, o = evens[base : base + channels], odds[base : base + channels]
            later = base + (shift + 1) * channels
            e_later, o_later = evens[later : later + channels], odds[later - channels : later]
            b = boths[(row * half + u) * channels : (row * half + u + 1) * channels]
            place = (row * count + 2 * u) * channels
            y = out[place : place + channels]
            for c in range(channels):
                y[c] = e[c] + o_later[c] + bias[c]
            if 2 * u + 1 < count:
                y = out[place + channels : place + 2 * channels]
                for c in range(channels):
                    y[c] = b[c] - e_later[c] - o[c] + bias[c]
        item = claim(block, 1)


@kernel(9)
def _split_f32(block: int) -> None:
    _split(block)


@kernel(10)
def _merge_f32(block: int) -> None:
    _merge(block)


@kernel(7)
def _moments_f32(block: int) -> None:
    _moments(block, np.float32)


@kernel(7)
def _moments_bf16(block: int) -> None:
    _moments(block, np.uint16)


@kernel(11)
def _snake_f32(block: int) -> None:
    _apply(block, np.float32, True)


@kernel(11)
def _snake_bf16(block: int) -> None:
    _apply(block, np.uint16, True)


@kernel(11)
def _leaky_f32(block: int) -> None:
    _apply(block, np.float32, False)


@kernel(11)
def _leaky_bf16(block: int) -> None:
    _apply(block, np.uint16, False)


_KERNELS = {
    torch.float32: (_moments_f32, _snake_f32, _leaky_f32),
    torch.bfloat16: (_moments_bf16, _snake_bf16, _leaky_bf16),
}


def adain(x: Tensor, lengths: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor | None) -> Tensor:
    """:func:`mstar_tts.kokoro.ops.adain_snake` with *alpha*, :func:`mstar_tts.kokoro.ops.adain_leaky` without."""
    x = x.contiguous()
    lengths = lengths.contiguous()
    rows, length, channels = x.shape
    blocks = -(-length // _BLOCK)
    moments, snake, leaky = _KERNELS[x.dtype]
    parallel = x.numel() >= _SHARED
    sums = torch.empty(rows, blocks, 2, channels)
    moments(parallel, x.data_ptr(), lengths.data_ptr(), sums.data_ptr(), rows, length, channels, blocks)
    first, second = (sums.double().sum(1) / lengths[:, None, None]).unbind(1)
    factors = (scale * torch.rsqrt(second - first.square() + _EPS)).float()
    means, shifts = (x[:, 0] + first).float(), shift.float().contiguous()
    slopes = factors if alpha is None else torch.cat([alpha.float(), 1 / alpha.float()])
    out = torch.empty_like(x)
    (leaky if alpha is None else snake)(
        parallel,
        x.data_ptr(),
        out.data_ptr(),
        lengths.data_ptr(),
        factors.data_ptr(),
        shifts.data_ptr(),
        slopes.data_ptr(),
        means.data_ptr(),
        rows,
        length,
        channels,
        blocks,
    )
    return out


def split(x: Tensor, padding: int, reach: int, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of float32 *x* ``[rows, T, channels]`` with *padding* zeros before it and any after it: *reach* even samples, as
    many odd ones, and each odd one plus the even one *ahead* places later; ``[rows, reach, channels]`` each."""
    rows, length, channels = x.shape
    halves = x.new_empty(2, rows, reach, channels)
    both = x.new_empty(rows, reach, channels)
    pointers = x.data_ptr(), halves.data_ptr(), both.data_ptr()
    _split_f32(x.numel() >= _SHARED, *pointers, rows, length, channels, padding, reach, ahead)
    return halves[0], halves[1], both


def merge(evens: Tensor, odds: Tensor, boths: Tensor, bias: Tensor | None, count: int, shift: int) -> Tensor:
    """*count* samples of each row out of its filters' outputs: *evens*, *odds* ``[rows, half + shift + 1, channels]``
    and *boths* ``[rows, half, channels]``; see :class:`mstar_tts.kokoro.fast_conv.FastConv`."""
    rows, half, channels = boths.shape
    evens, odds, boths = evens.contiguous(), odds.contiguous(), boths.contiguous()
    out = boths.new_empty(rows, count, channels)
    added = boths.new_zeros(channels) if bias is None else bias
    pointers = evens.data_ptr(), odds.data_ptr(), boths.data_ptr(), out.data_ptr(), added.data_ptr()
    _merge_f32(out.numel() >= _SHARED, *pointers, rows, count, half, half + shift + 1, channels)
    return out
