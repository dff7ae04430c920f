"""Linear layers for few rows as Triton kernels: what bounds them is reading the weight, so that is all they wait for.

Three ways, chosen by the number of rows and the layer's sizes (:mod:`mstar.nn.ops.cuda_linear_table`):

- one row, :func:`_one_row`: a program multiplies and adds a few rows of the weight, held in registers;
- more rows, :func:`_few_rows`: a tile of the weight passes through shared memory into tensor cores, several steps ahead
  of its use. Where a layer has too few output features to occupy the GPU, *split* programs share a tile's input
  features. The one that ends last adds up what all of them found, always in the same order;
- more rows, :func:`_narrow`: the same for tiles of a few output features, whose input features a program's warps share.
  So there are programs enough without meeting in memory, and what they found is added up where it is.

Sums are float32. A norm before the product is applied within it: ``rms_norm(x) @ w.T`` is the product of ``x * norm``,
divided by the root mean square of ``x``, which adds up on the way. A gated activation, or the sum with the residual
stream, is applied to the result before it is rounded, once.

With programmatic dependent launch the next kernel may start when all programs have read their weights: before, its own
reading would only delay theirs.

With one cut, a row's result depends neither on the other rows nor on their number. Cuts differ between classes of rows;
*deterministic* layers use one cut for any number of rows, so that a row has the same numbers in any batch, prompts
included: tiles of one shape, whose input features are divided and added up in one order. cuBLAS chooses both by the
number of rows. The price is paid by prompts, for which larger tiles would be faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mstar.nn.ops import cuda, pdl
from mstar.nn.ops.ahead import ask
from mstar.nn.ops.cuda_linear_table import CLASSES, Cut, Key, config, default, divided, row_class

__all__ = ["add_linear", "divided_linear", "linear", "norm_gate_up", "norm_linear", "refuses"]

_TYPES = (torch.bfloat16, torch.float16)
NORMED = 16
"""Most rows with which every program computes the norm anew; with more a kernel of its own does it once."""


# --- kernels ----------------------------------------------------------------------------------------------------------
@triton.jit
def _weight_rows(tile, features: tl.constexpr, block_n: tl.constexpr, gated: tl.constexpr):
    """The rows of the weight that a tile reads: for a gated layer half of them gates, then their ups. Beyond the end
    the last row again."""
    at = tl.arange(0, block_n)
    if gated:
        half: tl.constexpr = block_n // 2
        feature = tl.minimum(tile * half + at % half, features - 1)
        return feature + at // half * features
    else:
        return tl.minimum(tile * block_n + at, features - 1)


@triton.jit
def _read_ahead(w, weight_row, start, k_size: tl.constexpr, length: tl.constexpr):
    """Bring *length* (a power of two) input features of these rows, from *start*, into the L2 cache."""
    lines: tl.constexpr = max(length // 64, 1)  # of 128 bytes
    k = tl.minimum(start + tl.arange(0, lines) * 64, k_size - 1)
    address = (w + weight_row.to(tl.int64)[:, None] * k_size + k[None, :]).to(tl.int64)
    ask(address)


@triton.jit
def _finish(
    acc, square, bias, out, tile, weight_row, m, rows, eps, out_stride: tl.constexpr,
    features: tl.constexpr, k_size: tl.constexpr, block_n: tl.constexpr, block_m: tl.constexpr,
    normed: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, added: tl.constexpr,
):  # fmt: skip
    """From sums ``[block_n, block_m]`` to results."""
    if normed:
        acc *= (1 / tl.sqrt_rn(square / k_size + eps))[None, :]
    if biased:
        acc += tl.load(bias + weight_row).to(tl.float32)[:, None]
    if gated:
        half: tl.constexpr = block_n // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, block_m)), (1, 2, 0)))
        feature = tile * half + tl.arange(0, half)
        result = gate / (1 + tl.exp(-gate)) * up
    else:
        feature = tile * block_n + tl.arange(0, block_n)
        result = acc
    inside = (feature < features)[:, None] & (m < rows)[None, :]
    target = out + m.to(tl.int64)[None, :] * out_stride + feature[:, None]
    if added:
        result += tl.load(target, mask=inside, other=0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["bias"])
def _one_row(
    x, w, norm, bias, out, eps,
    features: tl.constexpr, k_size: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    normed: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    weight_row = _weight_rows(tile, features, block_n, gated)
    steps: tl.constexpr = (k_size + block_k - 1) // block_k
    even: tl.constexpr = k_size % block_k == 0
    at = tl.arange(0, block_k)
    line = w + weight_row.to(tl.int64)[:, None] * k_size + at[None, :]
    inside = (at < k_size) if not even and steps == 1 else (at < block_k)
    weights = tl.load(line, mask=inside[None, :], other=0, eviction_policy="evict_first")
    if early:
        if steps > 1:
            _read_ahead(w, weight_row, block_k, k_size, block_k)
        pdl.wait(early)
    acc = tl.zeros((block_n, block_k // 8), tl.float32)
    squares = tl.zeros((block_k,), tl.float32)
    for step in tl.static_range(steps):
        k = step * block_k + at
        inside = (k < k_size) if not even and step == steps - 1 else (at < block_k)
        if step + 1 < steps:
            beyond = k + block_k
            follows = (beyond < k_size) if not even and step == steps - 2 else (at < block_k)
            ahead = tl.load(
                line + (step + 1) * block_k, mask=follows[None, :], other=0, eviction_policy="evict_first"
            )  # fmt: skip
        else:
            pdl.release(early)
        value = tl.load(x + k, mask=inside, other=0).to(tl.float32)
        if normed:
            squares += value * value
            value *= tl.load(norm + k, mask=inside, other=0).to(tl.float32)
        products = weights.to(tl.float32) * value[None, :]
        acc += tl.sum(tl.reshape(products, (block_n, block_k // 8, 8)), 2)  # neighbours, which one thread holds
        if step + 1 < steps:
            weights = ahead
    _finish(
        tl.sum(acc, 1, keep_dims=True), tl.sum(squares, 0, keep_dims=True), bias, out,
        tile, weight_row, tl.arange(0, 1), 1, eps, 0,
        features, k_size, block_n, 1, normed, gated, biased, added,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias", "parts", "counters"])
def _few_rows(
    x, w, norm, bias, out, parts, counters, rows, eps, x_stride: tl.constexpr, out_stride: tl.constexpr,
    features: tl.constexpr, k_size: tl.constexpr, block_n: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
    split: tl.constexpr, stages: tl.constexpr,
    normed: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    tile, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    weight_row = _weight_rows(tile, features, block_n, gated)
    m = group * block_m + tl.arange(0, block_m)
    steps: tl.constexpr = (k_size + block_k * split - 1) // (block_k * split)
    even: tl.constexpr = k_size % (block_k * split) == 0
    first = part * steps * block_k
    if early:
        ahead: tl.constexpr = min(steps, 2) * block_k
        # The loop below begins with x as well, so it cannot begin yet.
        _read_ahead(w, weight_row, first, k_size, 1 << (min(ahead, k_size).bit_length() - 1))
        pdl.wait(early)
    line = w + weight_row.to(tl.int64)[:, None] * k_size
    column = x + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros((block_n, block_m), tl.float32)
    squares = tl.zeros((block_k, block_m), tl.float32)
    for step in tl.range(steps, num_stages=stages):
        k = first + step * block_k + tl.arange(0, block_k)
        is_row = (m < rows)[None, :]
        if even:
            weights = tl.load(line + k[None, :], eviction_policy="evict_first")
            values = tl.load(column + k[:, None], mask=is_row, other=0)
        else:
            weights = tl.load(line + k[None, :], mask=(k < k_size)[None, :], other=0, eviction_policy="evict_first")
            values = tl.load(column + k[:, None], mask=is_row & (k < k_size)[:, None], other=0)
        if normed:
            scale = tl.load(norm + k, mask=k < k_size, other=0).to(tl.float32)
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * scale[:, None]).to(values.dtype)
        acc = tl.dot(weights, values, acc)
    pdl.release(early)
    square = tl.sum(squares, 0)
    if split > 1:
        size: tl.constexpr = (block_n + 1) * block_m
        number = group * tl.num_programs(0) + tile
        mine = parts + (number.to(tl.int64) * split) * size
        within = tl.arange(0, block_n)[:, None] * block_m + tl.arange(0, block_m)[None, :]
        lane = block_n * block_m + tl.arange(0, block_m)
        tl.store(mine + part * size + within, acc)
        if normed:
            tl.store(mine + part * size + lane, square)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") != split - 1:
            return
        tl.store(counters + number, 0)
        acc = tl.zeros((block_n, block_m), tl.float32)
        square = tl.zeros((block_m,), tl.float32)
        for each in tl.static_range(split):
            acc += tl.load(mine + each * size + within, cache_modifier=".cg")
            if normed:
                square += tl.load(mine + each * size + lane, cache_modifier=".cg")
    _finish(
        acc, square, bias, out, tile, weight_row, m, rows, eps, out_stride,
        features, k_size, block_n, block_m, normed, gated, biased, added,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _narrow(
    x, w, norm, bias, out, rows, eps, x_stride: tl.constexpr, out_stride: tl.constexpr,
    features: tl.constexpr, k_size: tl.constexpr, block_n: tl.constexpr, block_m: tl.constexpr, block_k: tl.constexpr,
    within: tl.constexpr, stages: tl.constexpr,
    normed: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr, added: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    weight_row = _weight_rows(tile, features, block_n, gated)
    m = group * block_m + tl.arange(0, block_m)
    span: tl.constexpr = block_k * within
    steps: tl.constexpr = (k_size + span - 1) // span
    even: tl.constexpr = k_size % span == 0
    if early:
        ahead: tl.constexpr = min(steps, 2) * span
        _read_ahead(w, weight_row, 0, k_size, 1 << (min(ahead, k_size).bit_length() - 1))
        pdl.wait(early)
    at = tl.arange(0, within)[:, None] * block_k + tl.arange(0, block_k)[None, :]
    line = w + weight_row.to(tl.int64)[None, :, None] * k_size + at[:, None, :]
    column = x + m.to(tl.int64)[None, None, :] * x_stride + at[:, :, None]
    acc = tl.zeros((within, block_n, block_m), tl.float32)
    squares = tl.zeros((within, block_k, block_m), tl.float32)
    for step in tl.range(steps, num_stages=stages):
        start = step * span
        is_row = (m < rows)[None, None, :]
        if even:
            weights = tl.load(line + start, eviction_policy="evict_first")
            values = tl.load(column + start, mask=is_row, other=0)
        else:
            inside = at < k_size - start
            weights = tl.load(line + start, mask=inside[:, None, :], other=0, eviction_policy="evict_first")
            values = tl.load(column + start, mask=is_row & inside[:, :, None], other=0)
        if normed:
            scale = tl.load(norm + start + at, mask=at < k_size - start, other=0).to(tl.float32)
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * scale[:, :, None]).to(values.dtype)
        acc = tl.dot(weights, values, acc)  # a product for each warp
    pdl.release(early)
    _finish(
        tl.sum(acc, 0), tl.sum(tl.sum(squares, 1), 0), bias, out, tile, weight_row, m, rows, eps, out_stride,
        features, k_size, block_n, block_m, normed, gated, biased, added,
    )  # fmt: skip


# --- launching --------------------------------------------------------------------------------------------------------
_COUNTERS = 1024
"""Tiles that are added up by a launch."""
_STREAMS = 72  # torch has a pool of 32 a priority, and there is the default one
_pools: dict[torch.device, Tensor] = {}
_lines: dict[tuple[torch.device, int], Tensor] = {}


def _counters(device: torch.device) -> Tensor:
    """Zeros int32, which every kernel leaves as zeros. Each stream has its own, as its kernels follow one another; so
    graphs that were captured on one stream must not run at the same time."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    line = _lines.get((device, stream))
    if line is None:
        pool = _pools.get(device)
        if pool is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the first linear layer on a device cannot be captured: run the step once before")
            pool = _pools[device] = torch.zeros((_STREAMS, _COUNTERS), dtype=torch.int32, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other streams will use their lines
        used = sum(known == device for known, _ in _lines)
        if used == _STREAMS:
            raise RuntimeError(f"linear layers run on more than {_STREAMS} streams")
        line = _lines[device, stream] = pool[used]
    return line


def refuses(weight: Tensor, bias: Tensor | None) -> str | None:
    """``None``, or why a deterministic layer cannot have this *weight* ``[N, K]``."""
    if weight.dim() != 2 or type(weight) not in (Tensor, nn.Parameter) or not weight.is_contiguous():
        return "its weight is not one plain matrix"
    if weight.dtype not in _TYPES or (bias is not None and bias.dtype is not weight.dtype):
        return f"there is no kernel for {weight.dtype}, only for bfloat16 and float16"
    return f"{weight.shape[1]} input features are not a multiple of 16" if weight.shape[1] % 16 else None


def _cut(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, deterministic: bool) -> tuple[int, Cut] | None:
    """Most rows of a program and the cut; ``None`` if the layer is not for these kernels."""
    if (
        x.dim() != 2
        or x.dtype not in _TYPES
        or weight.dtype is not x.dtype
        or type(weight) not in (Tensor, nn.Parameter)
    ):
        return None
    rows, k = x.shape
    n = weight.shape[0]
    fits = weight.is_contiguous() and x.stride(1) == 1 and x.stride(0) % 8 == 0 and k % 16 == 0
    if not fits or not rows or (bias is not None and bias.dtype is not x.dtype):
        return None
    if deterministic:
        return CLASSES[-1], default(Key(n, k, gated, CLASSES[-1]))
    if k < 128 or n < 128:
        return None
    most = row_class(rows)
    cut = None if most is None else config(Key(n, k, gated, most))
    return None if most is None or cut is None else (most, cut)


def _launch(
    x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, bias: Tensor | None, out: Tensor,
    most: int, cut: Cut, gated: bool, added: bool,
) -> None:  # fmt: skip
    rows, k = x.shape
    features = out.shape[1]
    tiles = -(-weight.shape[0] // cut.block_n) if not gated else -(-features // (cut.block_n // 2))
    flags = (norm is not None, gated, bias is not None, added, pdl.enabled())
    norm, bias = x if norm is None else norm, x if bias is None else bias
    if most == 1:
        _one_row[(tiles,)](
            x, weight, norm, bias, out, eps, features, k, cut.block_n, cut.block_k, *flags,
            num_warps=cut.warps, **pdl.options(),
        )  # fmt: skip
        return
    # Wide tiles go through products of a warp group, which Triton makes for 16 rows and not for 8.
    block_m = max(most, 8 if cut.narrow else 16)
    if cut.narrow:
        _narrow[(tiles, -(-rows // block_m))](
            x, weight, norm, bias, out, rows, eps, x.stride(0), out.stride(0),
            features, k, cut.block_n, block_m, cut.block_k, cut.warps, cut.stages, *flags,
            num_warps=cut.warps, **pdl.options(),
        )  # fmt: skip
        return
    if tiles > _COUNTERS:
        cut = cut._replace(split=1)
    at_once = rows if cut.split == 1 else _COUNTERS // tiles * block_m
    for start in range(0, rows, at_once):  # one turn, but for a prompt in deterministic mode
        some, result = x[start : start + at_once], out[start : start + at_once]
        groups = -(-some.shape[0] // block_m)
        parts = counters = x
        if cut.split > 1:
            size = groups * tiles * cut.split * (cut.block_n + 1) * block_m
            parts, counters = x.new_empty(size, dtype=torch.float32), _counters(x.device)
        _few_rows[(tiles, cut.split, groups)](
            some, weight, norm, bias, result, parts, counters, some.shape[0], eps, x.stride(0), out.stride(0),
            features, k, cut.block_n, block_m, cut.block_k, cut.split, cut.stages, *flags,
            num_warps=cut.warps, **pdl.options(),
        )  # fmt: skip


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool = False) -> Tensor | None:
    found = _cut(x, weight, bias, False, deterministic)
    if found is None:
        return None
    out = x.new_empty((x.shape[0], weight.shape[0]))
    _launch(x, weight, None, 0.0, bias, out, *found, gated=False, added=False)
    return out


def add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, deterministic: bool = False) -> bool:
    found = _cut(x, weight, bias, False, deterministic)
    if found is None or residual.dtype is not x.dtype or residual.dim() != 2 or residual.stride(1) != 1:
        return False
    _launch(x, weight, None, 0.0, bias, residual, *found, gated=False, added=True)
    return True


def divided_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    parts = divided(weight.shape[0], weight.shape[1], x.shape[0]) if x.dim() == 2 and weight.dim() == 2 else None
    known = x.dtype in _TYPES and weight.dtype is x.dtype and type(weight) in (Tensor, nn.Parameter)
    if parts is None or not known or not weight.is_contiguous() or x.stride(1) != 1:
        return None
    columns = weight.shape[1] // parts
    inputs, weights = x.unflatten(1, (parts, columns)), weight.view(-1, parts, columns)
    return torch.bmm(inputs.transpose(0, 1), weights.permute(1, 2, 0), out_dtype=torch.float32)


def _normed(x: Tensor, norm: Tensor, eps: float, weight: Tensor, deterministic: bool) -> tuple[Tensor, Tensor | None]:
    """What the kernel is to read and to scale by. float16 might not hold the stream times the norm's weight. Many rows
    are normed once, and so are all where they must be treated alike."""
    within = x.dtype is torch.bfloat16 and x.shape[0] <= NORMED and not deterministic
    return (x, norm) if within else (cuda.add_rms_norm(x, None, norm, eps, x.dtype, weight), None)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, deterministic: bool = False
) -> Tensor | None:
    found = _cut(x, weight, bias, False, deterministic)
    if found is None or norm.dtype not in (x.dtype, torch.float32):
        return None
    out = x.new_empty((x.shape[0], weight.shape[0]))
    read, scale = _normed(x, norm, eps, weight, deterministic)
    _launch(read, weight, scale, eps, bias, out, *found, gated=False, added=False)
    return out


def norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, deterministic: bool = False
) -> Tensor | None:
    found = _cut(x, weight, bias, True, deterministic)
    if found is None or norm.dtype not in (x.dtype, torch.float32):
        return None
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    read, scale = _normed(x, norm, eps, weight, deterministic)
    _launch(read, weight, scale, eps, bias, out, *found, gated=True, added=False)
    return out
