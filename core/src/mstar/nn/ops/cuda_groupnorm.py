"""Group norm and SiLU of pictures whose channels lie side by side in memory (NHWC), as Triton kernels.

PyTorch's group norm on CUDA orders its input by channel first and leaves it so (``native_group_norm`` of torch 2.13).
Between convolutions that want channels last a picture is then copied there and back, and the activation reads it once
more. Here it is read twice and written once, whatever its size:

1. *moments*: each program takes one piece of the points and gives mean and sum of squared distances of every channel.
   Each of its lanes follows a few channels through all tiles of the piece (Welford 1962); they are joined at the end;
2. *factors*: pieces and the channels of a group are joined (Chan, Golub, LeVeque 1979: no difference of large sums),
   and the norm becomes one factor and one addend a channel;
3. *apply*.

Pieces are cut by the picture's size alone and joined in their order, so a row's numbers do not depend on its step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import pdl, reference

__all__ = ["add_channels", "group_norm"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_TILE = 8192
"""Elements that a program holds at once: 32 a thread of 8 warps."""
_PIECES = 512
"""Most pieces of a picture: enough programs for any device, and few enough to be joined by one."""
_JOINED = 256
"""Pieces that are joined at a time."""


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@triton.jit
def _moments(
    x, added, means, squares, points, tiles: tl.constexpr, channels: tl.constexpr, adds: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = number * tiles * tile
    end = tl.minimum(begin + tiles * tile, points)
    channel = tl.arange(0, block)
    mean = tl.zeros((tile, block), tl.float32)
    square = tl.zeros((tile, block), tl.float32)
    seen = tl.zeros((tile,), tl.float32)
    before = tl.zeros((block,), tl.float32)
    if adds:
        before = tl.load(added + channel, mask=channel < channels, other=0).to(tl.float32)
    for turn in tl.range(0, tiles, num_stages=3):  # the next tiles are on their way meanwhile
        point = begin + turn * tile + tl.arange(0, tile)
        real = point < end  # the last piece may have fewer tiles
        inside = real[:, None] & (channel < channels)[None, :]
        at = (row * points + point)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + before[None, :]
        seen += tl.where(real, 1.0, 0.0)
        moved = tl.where(inside, value - mean, 0)
        mean += moved * (1 / tl.maximum(seen, 1))[:, None]
        square += moved * (value - mean)
    count = tl.sum(seen, 0)
    middle = tl.sum(mean * seen[:, None], 0) / tl.maximum(count, 1)
    apart = mean - middle[None, :]
    at = (row * tl.num_programs(0) + number) * channels + channel
    tl.store(means + at, middle, mask=channel < channels)
    tl.store(squares + at, tl.sum(square + apart * apart * seen[:, None], 0), mask=channel < channels)


@triton.jit
def _factors(
    means, squares, weight, bias, factor, addend, points, piece, pieces, eps, turns: tl.constexpr,
    channels: tl.constexpr, width: tl.constexpr, joined: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, block)
    channel = group * width + lane
    mine = lane < width
    total = tl.zeros((joined, block), tl.float32)
    for turn in tl.range(0, turns):
        number = turn * joined + tl.arange(0, joined)
        count = tl.maximum(tl.minimum(points - number * piece, piece), 0).to(tl.float32)
        inside = (number < pieces)[:, None] & mine[None, :]
        at = (row * pieces + number)[:, None] * channels + channel[None, :]
        total += tl.load(means + at, mask=inside, other=0) * count[:, None]
    elements = points * 1.0 * width  # a number when there is one point only: such arguments have no `.to`
    mean = tl.sum(tl.sum(total, 0), 0) / elements
    spread = tl.zeros((joined, block), tl.float32)
    for turn in tl.range(0, turns):
        number = turn * joined + tl.arange(0, joined)
        count = tl.maximum(tl.minimum(points - number * piece, piece), 0).to(tl.float32)
        inside = (number < pieces)[:, None] & mine[None, :]
        at = (row * pieces + number)[:, None] * channels + channel[None, :]
        apart = tl.load(means + at, mask=inside, other=0) - mean
        spread += tl.where(inside, tl.load(squares + at, mask=inside, other=0) + apart * apart * count[:, None], 0)
    scale = 1 / tl.sqrt_rn(tl.sum(tl.sum(spread, 0), 0) / elements + eps)
    times = tl.load(weight + channel, mask=mine, other=0).to(tl.float32) * scale
    plus = tl.load(bias + channel, mask=mine, other=0).to(tl.float32) - mean * times
    tl.store(factor + row * channels + channel, times, mask=mine)
    tl.store(addend + row * channels + channel, plus, mask=mine)


@triton.jit
def _apply(
    x, added, factor, addend, out, points, channels: tl.constexpr, adds: tl.constexpr, activated: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(1).to(tl.int64)
    point = tl.program_id(0) * tile + tl.arange(0, tile)
    channel = tl.arange(0, block)
    known = channel < channels
    times = tl.load(factor + row * channels + channel, mask=known, other=0)
    plus = tl.load(addend + row * channels + channel, mask=known, other=0)
    if adds:
        plus += tl.load(added + channel, mask=known, other=0).to(tl.float32) * times
    inside = (point < points)[:, None] & known[None, :]
    at = (row * points + point)[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32) * times[None, :] + plus[None, :]
    if activated:
        value = value / (1 + tl.exp(-value))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(
    x, y, added, out, points, channels: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, early: tl.constexpr
):  # fmt: skip
    pdl.begin(early)
    point = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    channel = tl.arange(0, block)
    known = channel < channels
    inside = (point < points)[:, None] & known[None, :]
    at = point[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + tl.load(y + at, mask=inside, other=0).to(tl.float32)
    value += tl.load(added + channel, mask=known, other=0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def add_channels(x: Tensor, y: Tensor, added: Tensor) -> Tensor:
    """:func:`mstar.nn.ops.add_channels`. What does not have its channels side by side goes to the reference."""
    channels, last = x.shape[1], x.movedim(1, -1)
    known = all(tensor.dtype in _TYPES for tensor in (x, y, added)) and x.shape == y.shape
    side_by_side = last.is_contiguous() and y.movedim(1, -1).is_contiguous()
    if not x.numel() or not known or channels > _TILE or not side_by_side:
        return reference.add_channels(x, y, added)
    points, block = x.numel() // channels, _power(channels)
    tile = max(_TILE // 2 // block, 1)
    out = torch.empty_like(x)
    grid, launch = (-(-points // tile),), pdl.options()
    _add[grid](x, y, added.contiguous(), out, points, channels, tile, block, pdl.enabled(), num_warps=8, **launch)
    return out


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool = False, added: Tensor | None = None
) -> Tensor:
    """:func:`mstar.nn.ops.group_norm`. What does not have its channels side by side goes to the reference."""
    rows, channels = x.shape[:2]
    points = x[0, 0].numel() if rows else 0
    adds = added is not None
    added = weight if added is None else added.contiguous()
    known = all(tensor.dtype in _TYPES for tensor in (x, weight, bias, added))
    if not points or not known or channels > _TILE or not x.movedim(1, -1).is_contiguous():
        return reference.group_norm(x, groups, weight, bias, eps, silu, added if adds else None)
    weight, bias = weight.contiguous(), bias.contiguous()
    block = _power(channels)
    tile = max(_TILE // block, 1)
    tiles = -(-points // tile)
    each = _power(-(-tiles // _PIECES))  # constants of the kernels, so that a few variants serve all sizes
    pieces = -(-tiles // each)
    turns = _power(-(-pieces // _JOINED))
    means, squares = x.new_empty((2, rows, pieces, channels), dtype=torch.float32)
    factor, addend = x.new_empty((2, rows, channels), dtype=torch.float32)
    out = torch.empty_like(x)
    early, launch, width = pdl.enabled(), pdl.options(), channels // groups
    _moments[(pieces, rows)](
        x, added, means, squares, points, each, channels, adds, tile, block, early, num_warps=8, **launch
    )
    _factors[(groups, rows)](
        means, squares, weight, bias, factor, addend, points, each * tile, pieces, float(eps), turns, channels,
        width, _JOINED, _power(width), early, num_warps=4, **launch,
    )  # fmt: skip
    _apply[(tiles, rows)](
        x, added, factor, addend, out, points, channels, adds, silu, tile, block, early, num_warps=8, **launch
    )
    return out
