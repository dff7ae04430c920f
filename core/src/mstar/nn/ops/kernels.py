"""numba kernels of the elementwise operations between matrix products, for float32 and bfloat16 in memory.

Arithmetic is float32, each result is rounded once. Importing this module compiles the kernels, or loads them.
"""

from __future__ import annotations

import numpy as np

from mstar.nn.ops.jit import claim, double_at, exp, function, kernel, narrow, view, widen

__all__ = ["add_rms_norm_kernels", "rotate_kernels", "silu_mul_kernels", "store_kernels"]

# Work items are rows; a thread claims this many at once.
_ROWS = 4


@function
def _add_rms_norm(block, dtype):  # type: ignore[no-untyped-def]
    args = view(block, 8, np.int64)
    rows, size, eps = args[5], args[6], double_at(block, 7)
    residual, weight = view(args[1], rows * size, np.float32), view(args[3], size, dtype)
    delta, out = view(args[2], rows * size, dtype), view(args[4], rows * size, dtype)
    begin = claim(block, _ROWS)
    while begin < rows:
        for row in range(begin, min(begin + _ROWS, rows)):
            base = row * size
            x = residual[base : base + size]
            total = np.float32(0)
            if args[2]:
                d = delta[base : base + size]
                for i in range(size):
                    value = x[i] + widen(d[i])
                    x[i] = value
                    total += value * value
            else:
                for i in range(size):
                    total += x[i] * x[i]
            scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
            y = out[base : base + size]
            for i in range(size):
                y[i] = narrow(x[i] * scale * widen(weight[i]), y[i])
        begin = claim(block, _ROWS)


@function
def _silu_mul(block, dtype):  # type: ignore[no-untyped-def]
    args = view(block, 5, np.int64)
    rows, size = args[3], args[4]
    both, out = view(args[1], rows * size * 2, dtype), view(args[2], rows * size, dtype)
    begin = claim(block, _ROWS)
    while begin < rows:
        for row in range(begin, min(begin + _ROWS, rows)):
            gate = both[2 * row * size : (2 * row + 1) * size]
            up = both[(2 * row + 1) * size : (2 * row + 2) * size]
            y = out[row * size : (row + 1) * size]
            for i in range(size):
                g = widen(gate[i])
                small = exp(-abs(g))
                top = np.float32(1) if g >= np.float32(0) else small
                y[i] = narrow(g * widen(up[i]) * top / (np.float32(1) + small), y[i])
        begin = claim(block, _ROWS)


@function
def _rotate(block, dtype):  # type: ignore[no-untyped-def]
    args = view(block, 8, np.int64)
    rows, stride, heads, size = args[4], args[5], args[6], args[7]
    half = size // 2
    data = view(args[1], rows * stride, dtype)
    cos, sin = view(args[2], rows * size, dtype), view(args[3], rows * size, dtype)
    begin = claim(block, _ROWS)
    while begin < rows:
        for row in range(begin, min(begin + _ROWS, rows)):
            upper = row * size + half  # both halves of the angles are the same, but for the sign of the sine
            c, s = cos[upper : upper + half], sin[upper : upper + half]
            for head in range(heads):
                middle = row * stride + head * size + half
                low, high = data[middle - half : middle], data[middle : middle + half]
                for i in range(half):
                    a, b = widen(low[i]), widen(high[i])
                    low[i] = narrow(a * widen(c[i]) - b * widen(s[i]), low[i])
                    high[i] = narrow(b * widen(c[i]) + a * widen(s[i]), low[i])
        begin = claim(block, _ROWS)


@function
def _store(block, dtype):  # type: ignore[no-untyped-def]
    args = view(block, 11, np.int64)
    rows, width, k_stride, v_stride, tokens = args[6], args[7], args[8], args[9], args[10]
    keys, values = view(args[1], tokens * width, dtype), view(args[2], tokens * width, dtype)
    places = view(args[3], rows, np.int64)
    k, v = view(args[4], rows * k_stride, dtype), view(args[5], rows * v_stride, dtype)
    begin = claim(block, _ROWS)
    while begin < rows:
        for row in range(begin, min(begin + _ROWS, rows)):
            target = places[row] * width
            for i in range(width):
                keys[target + i] = k[row * k_stride + i]
            for i in range(width):
                values[target + i] = v[row * v_stride + i]
        begin = claim(block, _ROWS)


@kernel(7)
def _add_rms_norm_f32(block: int) -> None:
    _add_rms_norm(block, np.float32)


@kernel(7)
def _add_rms_norm_bf16(block: int) -> None:
    _add_rms_norm(block, np.uint16)


@kernel(4)
def _silu_mul_f32(block: int) -> None:
    _silu_mul(block, np.float32)


@kernel(4)
def _silu_mul_bf16(block: int) -> None:
    _silu_mul(block, np.uint16)


@kernel(7)
def _rotate_f32(block: int) -> None:
    _rotate(block, np.float32)


@kernel(7)
def _rotate_bf16(block: int) -> None:
    _rotate(block, np.uint16)


@kernel(10)
def _store_f32(block: int) -> None:
    _store(block, np.float32)


@kernel(10)
def _store_bf16(block: int) -> None:
    _store(block, np.uint16)


# Each pair is for float32 and for bfloat16.
add_rms_norm_kernels = (_add_rms_norm_f32, _add_rms_norm_bf16)
silu_mul_kernels = (_silu_mul_f32, _silu_mul_bf16)
rotate_kernels = (_rotate_f32, _rotate_bf16)
store_kernels = (_store_f32, _store_bf16)
