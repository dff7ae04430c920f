"""The operations of :mod:`mstar.nn.ops` as Triton kernels, one launch each. What a kernel does not take goes to the
reference.

Arithmetic is float32 and every result is rounded once. A row is computed by programs of its own, which never look at
another row nor at their number: a request's numbers are the same alone and in any batch. Nothing here asks the device
anything, so every call can be captured in a CUDA graph. Sizes are compile-time constants: one variant a model, none
per batch size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import ahead, pdl, reference
from mstar.nn.ops.reference import HeadNorms

__all__ = ["add_layer_norm", "add_rms_norm", "rotate", "rotate_store", "rotation", "silu_mul", "store_rows"]

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

rotate = reference.rotate
"""Layers call :func:`rotate_store`."""


def _power(size: int) -> int:
    """The least power of two that is not below *size*: what a block must be."""
    return 1 << max(size - 1, 0).bit_length()


def _warps(elements: int) -> int:
    """Warps for a block of so many elements: 8 elements a thread, as far as there are warps."""
    return min(max(elements // 256, 1), 16)


def _known(*tensors: Tensor) -> bool:
    return all(tensor.dtype in _TYPES for tensor in tensors)


# --- norm and activation ----------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["rows", *ahead.ARGUMENTS[1:]], do_not_specialize_on_alignment=[ahead.ARGUMENTS[0]])
def _add_rms_norm(
    residual, delta, weight, out, eps, rows, next_weight, next_lines, next_of_row, next_of_part, next_row, next_part,
    stride: tl.constexpr, delta_stride: tl.constexpr, size: tl.constexpr, added: tl.constexpr, block: tl.constexpr,
    turn: tl.constexpr, line: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if turn:
        beyond = tl.program_id(0) - rows
        if beyond >= 0:
            ahead.fetch(next_weight, beyond, next_lines, next_of_row, next_of_part, next_row, next_part, turn, line)
            return
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(residual + row * stride + at, mask=inside, other=0)
    w = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    if added:
        d = tl.load(delta + row * delta_stride + at, mask=inside, other=0).to(tl.float32)
        for part in tl.static_range(1, added):
            d += tl.load(delta + (part * rows + row) * delta_stride + at, mask=inside, other=0).to(tl.float32)
        # The norm is that of the stream as it is kept, rounding included.
        x = (x.to(tl.float32) + d).to(x.dtype)
        tl.store(residual + row * stride + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / size + eps)
    tl.store(out + row * size + at, (x * scale * w).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    following: Tensor | None = None,
) -> Tensor:
    size, dtype = weight.shape[0], dtype or weight.dtype
    known = _known(residual, weight) if delta is None else _known(residual, weight, delta)
    if residual.dim() != 2 or residual.stride(1) != 1 or not known or not weight.is_contiguous():
        return reference.add_rms_norm(residual, delta, weight, eps, dtype)
    parts = 0 if delta is None else 1 if delta.numel() == residual.numel() else delta.shape[0]
    if delta is not None and (parts > 1 or delta.dim() != 2 or delta.stride(1) != 1):
        delta = delta.reshape(-1, size).contiguous()
    out = torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)
    if rows := residual.shape[0]:
        added = residual if delta is None else delta
        block = _power(size)
        warps = _warps(block)
        asked = ahead.plan(following, rows)
        more, turn = (0, 0) if asked is None else (asked.programs(warps), ahead.lines_of(warps))
        _add_rms_norm[(rows + more,)](
            residual, added, weight, out, eps, rows, *(asked or ahead.nothing(weight)), residual.stride(0),
            added.stride(0), size, parts, block, turn, ahead.LINE, pdl.enabled(), num_warps=warps,
            **pdl.options(),
        )  # fmt: skip
    return out


@triton.jit
def _add_layer_norm(
    residual, delta, weight, bias, out, eps, stride: tl.constexpr, delta_stride: tl.constexpr, size: tl.constexpr,
    added: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    x = tl.load(residual + row * stride + at, mask=inside, other=0)
    w = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    b = tl.load(bias + at, mask=inside, other=0).to(tl.float32)
    if added:
        d = tl.load(delta + row * delta_stride + at, mask=inside, other=0)
        # The norm is that of the stream as it is kept, rounding included.
        x = (x.to(tl.float32) + d.to(tl.float32)).to(x.dtype)
        tl.store(residual + row * stride + at, x, mask=inside)
    x = x.to(tl.float32)
    apart = tl.where(inside, x - tl.sum(x, 0) / size, 0)  # squares of what is left: no digits are lost to a large mean
    scale = 1 / tl.sqrt_rn(tl.sum(apart * apart, 0) / size + eps)
    tl.store(out + row * size + at, (apart * scale * w + b).to(out.dtype.element_ty), mask=inside)


def add_layer_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    size = weight.shape[0]
    known = _known(residual, weight, bias) and (delta is None or _known(delta))
    packed = weight.is_contiguous() and bias.is_contiguous()
    if residual.dim() != 2 or residual.stride(1) != 1 or not known or not packed:
        return reference.add_layer_norm(residual, delta, weight, bias, eps)
    if delta is not None and (delta.dim() != 2 or delta.stride(1) != 1):
        delta = delta.reshape(residual.shape).contiguous()
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if rows := residual.shape[0]:
        added = residual if delta is None else delta
        block = _power(size)
        _add_layer_norm[(rows,)](
            residual, added, weight, bias, out, eps, residual.stride(0), added.stride(0), size, delta is not None,
            block, pdl.enabled(), num_warps=_warps(block), **pdl.options(),
        )  # fmt: skip
    return out


_ACTIVATED = 512
"""Elements that one program activates: enough programs at one row, whole lines of memory at many."""


@triton.jit(do_not_specialize=["rows", *ahead.ARGUMENTS[1:]], do_not_specialize_on_alignment=[ahead.ARGUMENTS[0]])
def _silu_mul(
    gate_up, out, rows, next_weight, next_lines, next_of_row, next_of_part, next_row, next_part,
    stride: tl.constexpr, size: tl.constexpr, block: tl.constexpr, turn: tl.constexpr, line: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    if turn:
        beyond = (tl.program_id(0) - rows) * tl.num_programs(1) + tl.program_id(1)
        if beyond >= 0:
            ahead.fetch(next_weight, beyond, next_lines, next_of_row, next_of_part, next_row, next_part, turn, line)
            return
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=inside, other=0).to(tl.float32)
    activated = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * size + at, activated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, following: Tensor | None = None) -> Tensor:
    if gate_up.dim() != 2 or gate_up.stride(1) != 1 or not _known(gate_up):
        return reference.silu_mul(gate_up)
    rows, both = gate_up.shape
    size = both // 2
    out = gate_up.new_empty((rows, size))
    if rows:
        block = min(_power(size), _ACTIVATED)
        blocks, warps = -(-size // block), _warps(block)
        asked = ahead.plan(following, rows)
        more, turn = (0, 0) if asked is None else (-(-asked.programs(warps) // blocks), ahead.lines_of(warps))
        _silu_mul[(rows + more, blocks)](
            gate_up, out, rows, *(asked or ahead.nothing(gate_up)), gate_up.stride(0), size, block, turn, ahead.LINE,
            pdl.enabled(), num_warps=warps, **pdl.options(),
        )  # fmt: skip
    return out


@triton.jit
def _sigmoid_mul(
    x, gate, out, stride: tl.constexpr, gate_stride: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gates = tl.load(gate + row * gate_stride + at, mask=inside, other=0).to(tl.float32)
    values = tl.load(x + row * stride + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * size + at, (values / (1 + tl.exp(-gates))).to(out.dtype.element_ty), mask=inside)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    if x.dim() != 2 or x.stride(1) != 1 or gate.stride(1) != 1 or not _known(x, gate):
        return reference.sigmoid_mul(x, gate)
    rows, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        block = min(_power(size), _ACTIVATED)
        _sigmoid_mul[(rows, -(-size // block))](
            x, gate, out, x.stride(0), gate.stride(0), size, block, pdl.enabled(), num_warps=_warps(block),
            **pdl.options(),
        )  # fmt: skip
    return out


# --- rotation and the cache -------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["positions"])
def _rotation(
    positions, inverse, axes, cos, sin, scale, stride, size: tl.constexpr, block: tl.constexpr, several: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    if several:
        axis = tl.load(axes + at, mask=inside, other=0)
        position = tl.load(positions + axis * stride + row, mask=inside, other=0).to(tl.float32)
    else:
        position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(inverse + at, mask=inside, other=0)
    tl.store(cos + row * size + at, (tl.cos(angle) * scale).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + row * size + at, (tl.sin(angle) * scale).to(sin.dtype.element_ty), mask=inside)


def rotation(
    positions: Tensor, inverse: Tensor, scale: float, dtype: torch.dtype, axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    several = axes is not None
    fits = positions.dim() == 1 + several and positions.stride(-1) == 1
    if not fits or inverse.dtype is not torch.float32 or dtype not in _TYPES:
        return reference.rotation(positions, inverse, scale, dtype, axes)
    rows, size = positions.shape[-1], inverse.shape[0]
    cos, sin = torch.empty((2, rows, 1, size), dtype=dtype, device=inverse.device).unbind(0)
    if rows:
        # As a float, so that a scale of 1 makes no variant of its own.
        _rotation[(rows,)](
            positions, inverse, inverse if axes is None else axes, cos, sin, float(scale),
            positions.stride(0) if several else 0, size, _power(size), several,
            pdl.enabled(), num_warps=1, **pdl.options(),
        )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["places"])
def _rotate_store(
    heads, q, cos, sin, q_weight, k_weight, eps, keys, values, places,
    stride: tl.constexpr, q_heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr,
    normed: tl.constexpr, stored: tl.constexpr, group: tl.constexpr, half_block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """One program takes *group* heads of one token, as their lower and upper halves ``[group, size / 2]``."""
    half: tl.constexpr = size // 2
    turning: tl.constexpr = q_heads + kv_heads
    width: tl.constexpr = kv_heads * size
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * group + tl.arange(0, group))[:, None]
    at = tl.arange(0, half_block)[None, :]
    inside = (head < turning + kv_heads) & (at < half)
    source = heads + row * stride + head * size + at
    raw_low = tl.load(source, mask=inside, other=0)
    raw_high = tl.load(source + half, mask=inside, other=0)
    angle = row * size + half + at  # both halves of the angles are the same, but for the sign of the sine
    c = tl.load(cos + angle, mask=at < half, other=0).to(tl.float32)
    s = tl.load(sin + angle, mask=at < half, other=0).to(tl.float32)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if normed:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = (1 / tl.sqrt_rn(square / size + eps))[:, None]
        for_q, for_k = inside & (head < q_heads), inside & (head >= q_heads) & (head < turning)
        low_weight = tl.load(q_weight + at + head * 0, mask=for_q, other=0).to(tl.float32)
        high_weight = tl.load(q_weight + half + at + head * 0, mask=for_q, other=0).to(tl.float32)
        low_weight += tl.load(k_weight + at + head * 0, mask=for_k, other=0).to(tl.float32)
        high_weight += tl.load(k_weight + half + at + head * 0, mask=for_k, other=0).to(tl.float32)
        low, high = low * scale * low_weight, high * scale * high_weight
    turned_low = (low * c - high * s).to(q.dtype.element_ty)
    turned_high = (high * c + low * s).to(q.dtype.element_ty)
    is_q = inside & (head < q_heads)
    target = q + (row * q_heads + head) * size + at
    tl.store(target, turned_low, mask=is_q)
    tl.store(target + half, turned_high, mask=is_q)
    is_k = inside & (head >= q_heads) & (head < turning)
    tl.store(source, turned_low, mask=is_k)
    tl.store(source + half, turned_high, mask=is_k)
    if stored:
        place = tl.load(places + row) * width + at
        key = keys + place + (head - q_heads) * size
        tl.store(key, turned_low.to(keys.dtype.element_ty), mask=is_k)
        tl.store(key + half, turned_high.to(keys.dtype.element_ty), mask=is_k)
        is_v = inside & (head >= turning)
        value = values + place + (head - turning) * size
        tl.store(value, raw_low.to(values.dtype.element_ty), mask=is_v)
        tl.store(value + half, raw_high.to(values.dtype.element_ty), mask=is_v)


_TURNED = 256
"""Pairs of elements that one program rotates: 4 heads of 128."""


def rotate_store(
    heads: Tensor,
    q_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    keys: Tensor | None,
    values: Tensor | None,
    places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, count, size = heads.shape
    stride, *inner = heads.stride()
    fits = inner == [size, 1] and cos.is_contiguous() and sin.is_contiguous() and _known(heads, cos, sin)
    if keys is not None and values is not None:
        fits = fits and keys.is_contiguous() and values.is_contiguous() and _known(keys, values)
    if norms is not None:
        fits = fits and norms.q.is_contiguous() and norms.k.is_contiguous() and _known(norms.q, norms.k)
    if not fits:
        return reference.rotate_store(heads, q_heads, cos, sin, norms, keys, values, places)
    kv_heads = (count - q_heads) // 2
    turning = q_heads + kv_heads
    q = heads.new_empty((rows, q_heads, size))
    stored = places is not None
    if rows:
        half_block = _power(size // 2)
        group = max(_TURNED // half_block, 1)
        used = count if stored else turning  # without a place, v stays as it is
        q_weight, k_weight, eps = (heads, heads, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        _rotate_store[(rows, -(-used // group))](
            heads, q, cos, sin, q_weight, k_weight, float(eps),
            keys if stored else heads, values if stored else heads, places if stored else heads,
            stride, q_heads, kv_heads, size, norms is not None, stored, group, half_block,
            pdl.enabled(), num_warps=2, **pdl.options(),
        )  # fmt: skip
    return q, heads[:, q_heads:turning], heads[:, turning:]


@triton.jit(do_not_specialize_on_alignment=["places"])
def _store_rows(
    keys, values, places, k, v, k_stride: tl.constexpr, v_stride: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    pdl.begin(early)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    place = tl.load(places + row) * width + at
    tl.store(keys + place, tl.load(k + row * k_stride + at, mask=inside).to(keys.dtype.element_ty), mask=inside)
    tl.store(values + place, tl.load(v + row * v_stride + at, mask=inside).to(values.dtype.element_ty), mask=inside)


def store_rows(keys: Tensor, values: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    rows, width = places.shape[0], keys.shape[1]
    fits = keys.is_contiguous() and values.is_contiguous() and _known(keys, values, k, v)
    if not fits or not (_packed(k) and _packed(v)):
        reference.store_rows(keys, values, places, k, v)
    elif rows:
        block = min(_power(width), 1024)
        grid = (rows, -(-width // block))
        _store_rows[grid](
            keys, values, places, k, v, k.stride(0), v.stride(0), width, block, pdl.enabled(),
            num_warps=_warps(block), **pdl.options(),
        )  # fmt: skip


def _packed(x: Tensor) -> bool:
    """Whether each row of ``[N, ...]`` is one run of memory."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
