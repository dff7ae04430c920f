"""The operations of :mod:`mstar.nn.ops.modulate` as Triton kernels, one launch each (for heads one a part). What a
kernel does not take goes to the reference.

Arithmetic is float32. Unlike those of :mod:`mstar.nn.ops.cuda`, results are rounded to the stream's dtype wherever the
plain operations store one: a sampler of a few steps makes much of last bits, and a picture is to be the one that its
authors' code paints. A token is computed by programs of its own, so its numbers do not depend on what else is there.
Numbers of rows and tokens and all distances are arguments: one variant a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mstar.nn.ops import modulate_reference, pdl
from mstar.nn.ops.cuda import _known, _power, _warps
from mstar.nn.ops.modulate import Addition, Heads, Norm

__all__ = ["add", "add_modulate", "modulate", "swiglu", "turn_heads"]

_LARGEST = 16384
"""Widths up to this are held in one program's registers."""


# --- norms and additions ----------------------------------------------------------------------------------------------
@triton.jit
def _normed(x, inside, weight, at, eps, size: tl.constexpr, kind: tl.constexpr, weighed: tl.constexpr):
    """*x* float32, 0 outside. *kind*: 1: over its root of the mean of squares; 2: also less its mean."""
    if kind == 2:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * (1 / tl.sqrt_rn(tl.sum(x * x, 0) / size + eps))
    if weighed:
        x = x * tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["tokens"])
def _add_modulate(
    x, delta, gate, inner_weight, weight, scale, shift, kept, out, inner_eps, eps, tokens,
    x_row, x_token, delta_row, delta_token, gate_row, scale_row, shift_row,
    size: tl.constexpr, block: tl.constexpr, added: tl.constexpr, gated: tl.constexpr, bounded: tl.constexpr,
    inner: tl.constexpr, inner_weighed: tl.constexpr, kind: tl.constexpr, weighed: tl.constexpr,
    scaled: tl.constexpr, shifted: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program takes one token. *inner* and *kind* are the norms' kinds; 0: there is none."""
    pdl.begin(early)
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    at = tl.arange(0, block)
    inside = at < size
    kept_as = out.dtype.element_ty
    value = tl.load(x + row * x_row + token * x_token + at, mask=inside, other=0).to(tl.float32)
    if added:
        d = tl.load(delta + row * delta_row + token * delta_token + at, mask=inside, other=0).to(tl.float32)
        if inner:
            d = _normed(d, inside, inner_weight, at, inner_eps, size, inner, inner_weighed).to(kept_as).to(tl.float32)
        if gated:
            g = tl.load(gate + row * gate_row + at, mask=inside, other=0).to(tl.float32)
            if bounded:
                g = _tanh(g).to(kept_as).to(tl.float32)
            d = (g * d).to(kept_as).to(tl.float32)
        value = (value + d).to(kept_as)
        tl.store(kept + place * size + at, value, mask=inside)
        value = value.to(tl.float32)
    if kind:
        value = _normed(value, inside, weight, at, eps, size, kind, weighed).to(kept_as)
        if scaled:
            s = 1 + tl.load(scale + row * scale_row + at, mask=inside, other=0).to(tl.float32)
            value = (s.to(kept_as).to(tl.float32) * value.to(tl.float32)).to(kept_as)
        if shifted:
            m = tl.load(shift + row * shift_row + at, mask=inside, other=0).to(tl.float32)
            value = (value.to(tl.float32) + m).to(kept_as)
        tl.store(out + place * size + at, value, mask=inside)


@triton.jit
def _tanh(x):
    """By the exponential of what is not positive, so that nothing overflows; near 0, where that cancels, by a series
    that is exact to float32's precision below 1/16."""
    size = tl.abs(x)
    small = tl.exp(-2 * size)
    square = x * x
    series = size * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    found = tl.where(size < 0.0625, series, (1 - small) / (1 + small))
    return tl.where(x < 0, -found, found)


def modulate(x: Tensor, norm: Norm, scale: Tensor | None, shift: Tensor | None = None) -> Tensor:
    if not _takes(x, None, norm, scale, shift):
        return modulate_reference.modulate(x, norm, scale, shift)
    return _launch(x, None, norm, scale, shift)[1]


def add(x: Tensor, addition: Addition) -> Tensor:
    if not _takes(x, addition, None, None, None):
        return modulate_reference.add(x, addition)
    return _launch(x, addition, None, None, None)[0]


def add_modulate(
    x: Tensor, addition: Addition, norm: Norm, scale: Tensor | None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if not _takes(x, addition, norm, scale, shift):
        return modulate_reference.add_modulate(x, addition, norm, scale, shift)
    return _launch(x, addition, norm, scale, shift)


def _takes(x: Tensor, addition: Addition | None, norm: Norm | None, scale: Tensor | None, shift: Tensor | None) -> bool:
    inner = None if addition is None else addition.norm
    vectors = (scale, shift, None if addition is None else addition.gate)
    fits = x.dim() == 3 and _known(x) and x.stride(2) == 1 and x.shape[2] <= _LARGEST
    if not fits or not all(one is None or _simple(one, x.shape[2]) for one in (norm, inner)):
        return False
    if addition is not None and not _alike(addition.delta, x, x.shape[1]):
        return False
    return all(vector is None or _alike(vector, x, 1) for vector in vectors)


def _alike(other: Tensor, x: Tensor, tokens: int) -> bool:
    shape = (x.shape[0], tokens, x.shape[2])
    return other.dtype is x.dtype and other.shape == shape and other.stride(2) == 1


def _simple(norm: Norm, size: int) -> bool:
    weight = norm.weight
    known = weight is None or (_known(weight) and weight.is_contiguous())
    without_bias = getattr(norm, "bias", None) is None
    return known and without_bias and tuple(norm.normalized_shape) == (size,) and norm.eps is not None


def _launch(
    x: Tensor, addition: Addition | None, norm: Norm | None, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The stream with *addition*, and its norm; where one is not wanted it is the other."""
    rows, tokens, size = x.shape
    out = kept = x.new_empty(x.shape)
    if addition is not None and norm is not None:
        kept = x.new_empty(x.shape)
    delta, gate, inner, bounded = addition or Addition(x)
    if rows * tokens:
        block = _power(size)
        _add_modulate[(rows * tokens,)](
            x, delta, _or(gate, x), _weight(inner, x), _weight(norm, x), _or(scale, x), _or(shift, x), kept, out,
            _eps(inner), _eps(norm), tokens, x.stride(0), x.stride(1), delta.stride(0), delta.stride(1),
            *(0 if vector is None else vector.stride(0) for vector in (gate, scale, shift)),
            size, block, addition is not None, gate is not None, bounded, _kind(inner), _weighed(inner), _kind(norm),
            _weighed(norm), scale is not None, shift is not None, pdl.enabled(), num_warps=_warps(block),
            **pdl.options(),
        )  # fmt: skip
    return kept, out


def _or(given: Tensor | None, instead: Tensor) -> Tensor:
    return instead if given is None else given


def _weight(norm: Norm | None, instead: Tensor) -> Tensor:
    return instead if norm is None else _or(norm.weight, instead)


def _weighed(norm: Norm | None) -> bool:
    return norm is not None and norm.weight is not None


def _eps(norm: Norm | None) -> float:
    return 0.0 if norm is None else float(norm.eps or 0.0)


def _kind(norm: Norm | None) -> int:
    return 0 if norm is None else 2 if isinstance(norm, nn.LayerNorm) else 1


# --- heads ------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"])
def _turn_heads(
    fused, q_weight, k_weight, cos, sin, out, q_eps, k_eps, tokens,
    fused_row, fused_token, out_plane, out_row, out_token,
    heads: tl.constexpr, planes: tl.constexpr, size: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One program takes *group* heads of one token, ``[group, block]``."""
    half: tl.constexpr = block // 2
    pdl.begin(early)
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    head = (tl.program_id(1) * group + tl.arange(0, group))[:, None]
    at = tl.arange(0, block)[None, :]
    inside = (head < planes * heads) & (at < size)
    raw = tl.load(fused + row * fused_row + token * fused_token + head * size + at, mask=inside, other=0)
    x = raw.to(tl.float32)
    weight = tl.where(
        head < heads,
        tl.load(q_weight + at, mask=at < size, other=0).to(tl.float32),
        tl.load(k_weight + at, mask=at < size, other=0).to(tl.float32),
    )
    eps = tl.where(head < heads, q_eps, k_eps)
    x = x * (1 / tl.sqrt_rn(tl.sum(x * x, 1)[:, None] / size + eps)) * weight
    x = x.to(raw.dtype).to(tl.float32)
    first, second = tl.split(tl.reshape(x, [group, half, 2]))
    pair = tl.arange(0, half)
    angle = token * (size // 2) + pair
    c = tl.load(cos + angle, mask=pair < size // 2, other=0)[None, :]
    s = tl.load(sin + angle, mask=pair < size // 2, other=0)[None, :]
    turned = tl.interleave(first * c - second * s, second * c + first * s).to(raw.dtype)
    plane = head // heads
    target = out + plane.to(tl.int64) * out_plane + row * out_row + token * out_token + (head % heads) * size + at
    tl.store(target, tl.where(plane == 2, raw, turned), mask=inside)


_TURNED = 1024
"""Elements that one program rotates: 8 heads of 128."""


def turn_heads(parts: Sequence[Heads], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = parts[0].fused
    tables = all(table.dtype is torch.float32 and table.is_contiguous() for table in (cos, sin))
    if not tables or not all(_turns(part, first) for part in parts):
        return modulate_reference.turn_heads(parts, cos, sin)
    rows, heads, size = first.shape[0], first.shape[3], first.shape[4]
    planes, block = 2 if len(parts) == 1 else 3, _power(size)
    group, begin = max(_TURNED // block, 1), 0
    out = first.new_empty((planes, rows, cos.shape[0], heads, size))
    for fused, q_norm, k_norm in parts:
        tokens = fused.shape[1]
        if rows * tokens:
            _turn_heads[(rows * tokens, -(-planes * heads // group))](
                fused, q_norm.weight, k_norm.weight, cos[begin:], sin[begin:], out[:, :, begin:], _eps(q_norm),
                _eps(k_norm), tokens, fused.stride(0), fused.stride(1), *out.stride()[:3], heads, planes, size, group,
                block, pdl.enabled(), num_warps=4, **pdl.options(),
            )  # fmt: skip
        begin += tokens
    return out[0], out[1], first[:, :, 2] if planes == 2 else out[2]


def _turns(part: Heads, first: Tensor) -> bool:
    fused, *norms = part
    rows, _, _, heads, size = first.shape
    alike = fused.shape[0] == rows and fused.shape[2:] == (3, heads, size) and fused.dtype is first.dtype
    fits = alike and _known(fused) and size % 2 == 0 and fused.stride()[2:] == (heads * size, size, 1)
    return fits and all(norm.weight is not None and _simple(norm, size) for norm in norms)


# --- an activation behind something else ------------------------------------------------------------------------------
_ACTIVATED = 1024
"""Elements that one program copies or activates."""


@triton.jit
def _swiglu(
    ahead, gate_up, out, ahead_stride, stride, width: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    before: tl.constexpr = (width + block - 1) // block
    pdl.begin(early)
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    target = out + place * (width + hidden)
    if part < before:
        at = part * block + tl.arange(0, block)
        inside = at < width
        tl.store(target + at, tl.load(ahead + place * ahead_stride + at, mask=inside), mask=inside)
    else:
        at = (part - before) * block + tl.arange(0, block)
        inside = at < hidden
        gate = tl.load(gate_up + place * stride + at, mask=inside, other=0).to(tl.float32)
        up = tl.load(gate_up + place * stride + hidden + at, mask=inside, other=0).to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
        tl.store(target + width + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, before: Tensor | None = None) -> Tensor:
    width = 0 if before is None else before.shape[-1]
    ahead = gate_up if before is None else before
    strides = _stride(ahead), _stride(gate_up)
    if None in strides or ahead.dtype is not gate_up.dtype or not _known(ahead):
        return modulate_reference.swiglu(gate_up, before)
    rows, tokens, both = gate_up.shape
    hidden = both // 2
    out = gate_up.new_empty((rows, tokens, width + hidden))
    if rows * tokens:
        block = min(_power(max(width, hidden)), _ACTIVATED)
        _swiglu[(rows * tokens, -(-width // block) - (-hidden // block))](
            ahead, gate_up, out, *strides, width, hidden, block, pdl.enabled(), num_warps=_warps(block), **pdl.options()
        )  # fmt: skip
    return out


def _stride(x: Tensor) -> int | None:
    """From one token to the next, across rows too; ``None``: tokens do not lie that evenly."""
    if x.dim() != 3 or x.stride(2) != 1 or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        return None
    return x.stride(1)
