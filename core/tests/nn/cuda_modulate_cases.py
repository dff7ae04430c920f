"""The Triton kernels of modulated transformers against the plain torch operations, from the same rounded inputs.

Run by ``test_cuda_cases.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
them there.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mstar.nn.ops import cuda_modulate, modulate_reference
from mstar.nn.ops.modulate import Addition, Heads

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16]
# Of the largest value, some three roundings deep. The interpreter cuts bfloat16 off where a GPU rounds to nearest.
ROUNDING = {torch.float32: 6e-6, torch.bfloat16: 2**-5 if INTERPRETED else 2**-6}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(got: Tensor, exact: Tensor) -> None:
    assert got.shape == exact.shape
    limit = ROUNDING[got.dtype]
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(got.float(), exact.float(), rtol=limit, atol=limit * largest / 2)


def layer_norm(width: int, dtype: torch.dtype) -> nn.LayerNorm:
    return nn.LayerNorm(width, 1e-6, elementwise_affine=False)


def rms_norm(width: int, dtype: torch.dtype, seed: int = 0) -> nn.RMSNorm:
    norm = nn.RMSNorm(width, 1e-5).requires_grad_(False).to(DEVICE, dtype)
    norm.weight.copy_(1 + draw(width, seed=seed) / 4)
    return norm


def wide(norm: Any) -> Any:
    """*norm* in float32, with the numbers that it has."""
    if norm is None or norm.weight is None:
        return norm
    twin = nn.RMSNorm(norm.normalized_shape, norm.eps).requires_grad_(False).to(DEVICE)
    twin.weight.copy_(norm.weight)
    return twin


def vectors(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Six of one projection, as a family has them."""
    return draw(rows, 6 * width, dtype=dtype)[:, None].chunk(6, -1)


def stream(rows: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Some tokens of a longer sequence, off its mean."""
    return draw(rows, tokens + 2, width, dtype=dtype)[:, 1 : 1 + tokens] + 1


SIZES = [(1, 3, 96), (2, 2, 250), (2, 1, 1100), (1, 0, 16)]
KINDS = [layer_norm, rms_norm]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "tokens", "width"), SIZES)
def test_modulate(dtype: torch.dtype, kind: Any, rows: int, tokens: int, width: int) -> None:
    x, norm = stream(rows, tokens, width, dtype), kind(width, dtype)
    before = x.clone()
    scale, shift, *_ = vectors(rows, width, dtype)
    for given in ((scale, shift), (scale, None), (None, None)):
        got = cuda_modulate.modulate(x, norm, *given)
        exact = (None if vector is None else vector.float() for vector in given)
        close(got, modulate_reference.modulate(x.float(), wide(norm), *exact))
        assert got.dtype is dtype
        assert got.is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [None, rms_norm])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "tokens", "width"), SIZES)
def test_add_and_what_follows(dtype: torch.dtype, inner: Any, gated: bool, rows: int, tokens: int, width: int) -> None:
    x, delta = stream(rows, tokens, width, dtype), draw(rows, tokens, width + 8, dtype=dtype)[..., :width]
    gate, scale, shift, *_ = vectors(rows, width, dtype)
    within = None if inner is None else inner(width, dtype, seed=1)
    before = x.clone()
    for kind in KINDS:
        norm = kind(width, dtype)
        for bounded in (False, True) if gated else (False,):
            addition = Addition(delta, gate if gated else None, within, bounded)
            exact = Addition(delta.float(), gate.float() if gated else None, wide(within), bounded)
            kept = modulate_reference.add(x.float(), exact)
            close(cuda_modulate.add(x, addition), kept)
            got = cuda_modulate.add_modulate(x, addition, norm, scale, shift)
            close(got[0], kept)
            after = modulate_reference.modulate(got[0].float(), wide(norm), scale.float(), shift.float())
            close(got[1], after)
            assert got[0].dtype is got[1].dtype is dtype
    assert torch.equal(x, before)


def test_a_gate_is_bounded_by_its_hyperbolic_tangent() -> None:
    gate = torch.cat((torch.linspace(-3, 3, 2001), torch.linspace(-0.1, 0.1, 2001), torch.tensor([-90.0, 90, 1e-30])))
    zero, one = torch.zeros(1, 1, gate.numel(), device=DEVICE), torch.ones(1, 1, gate.numel(), device=DEVICE)
    got = cuda_modulate.add(zero, Addition(one, gate.to(DEVICE)[None, None], bounded=True))
    torch.testing.assert_close(got[0, 0].double().cpu(), gate.double().tanh(), rtol=1e-6, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not round as a GPU does")
@pytest.mark.parametrize("kind", KINDS)
def test_roundings_are_those_of_plain_operations(kind: Any) -> None:
    """Or fewer: a GPU that has bfloat16 arithmetic takes a product and the sum that it goes into as one operation."""
    dtype = torch.bfloat16
    x, delta, norm = stream(2, 64, 3072, dtype), draw(2, 64, 3072, dtype=dtype), kind(3072, dtype)
    gate, scale, shift, *_ = vectors(2, 3072, dtype)
    got = cuda_modulate.add_modulate(x, Addition(delta, gate), norm, scale, shift)
    scaled = modulate_reference.modulate(got[0], norm, scale)
    for one, product, term in ((got[0], gate * delta, x), (got[1], scaled, shift)):
        want = (product + term).float()
        roundings = torch.finfo(dtype).eps * (want.abs() + product.abs().float())
        assert ((one.float() - want).abs() <= roundings).all()


def heads_of(rows: int, tokens: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> Heads:
    """Of a projection that computes more."""
    width = 3 * heads * size
    fused = draw(rows, tokens, width + 16, dtype=dtype, seed=seed)[..., :width].unflatten(-1, (3, heads, size))
    return Heads(fused, rms_norm(size, dtype, seed=seed), rms_norm(size, dtype, seed=seed + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(3,), (1, 2), (2, 0, 1), (0,)])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 2, 128), (2, 5, 64), (3, 9, 12), (1, 30, 32)])
def test_turn_heads(dtype: torch.dtype, lengths: tuple[int, ...], rows: int, heads: int, size: int) -> None:
    parts = [heads_of(rows, length, heads, size, dtype, seed) for seed, length in enumerate(lengths)]
    angles = draw(sum(lengths), size // 2, scale=20)
    cos, sin = angles.cos(), angles.sin()
    before = [part.fused.clone() for part in parts]
    got = cuda_modulate.turn_heads(parts, cos, sin)
    exact = [Heads(part.fused.float(), wide(part.q_norm), wide(part.k_norm)) for part in parts]
    for mine, want in zip(got, modulate_reference.turn_heads(exact, cos, sin), strict=True):
        assert mine.dtype is dtype
        close(mine, want)
    assert torch.equal(got[2], torch.cat([part.fused[:, :, 2] for part in parts], 1))
    assert all(torch.equal(part.fused, same) for part, same in zip(parts, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "width", "hidden"), [(1, 3, 96, 200), (2, 2, 1100, 40), (1, 0, 8, 8), (2, 3, None, 101)]
)
def test_swiglu(dtype: torch.dtype, rows: int, tokens: int, width: int | None, hidden: int) -> None:
    projected = draw(rows, tokens, 24 + 2 * hidden, dtype=dtype, scale=4)
    gate_up = projected[..., 24:]
    before = None if width is None else draw(rows, tokens, width, dtype=dtype)
    if tokens:
        gate_up[0, 0, :6] = torch.tensor([0, 300, -300, torch.inf, 88, -88]).to(gate_up)
    got = cuda_modulate.swiglu(gate_up, before)
    if before is not None:
        assert torch.equal(got[..., :width], before)
    exact = modulate_reference.swiglu(gate_up.double(), None if before is None else before.double())
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-7)


def test_what_a_kernel_does_not_take_goes_to_the_reference() -> None:
    norm = layer_norm(16, torch.float64)
    apart = draw(2, 16, 6).transpose(1, 2)  # elements of a token are not neighbours
    scale, shift, gate, *_ = vectors(2, 16, torch.float32)
    want = modulate_reference.modulate(apart, norm, scale, shift)
    assert torch.equal(cuda_modulate.modulate(apart, norm, scale, shift), want)
    double, addition = apart.double(), Addition(apart, gate)
    assert torch.equal(cuda_modulate.add(double, addition), modulate_reference.add(double, addition))
    with_bias = nn.LayerNorm(16).requires_grad_(False).to(DEVICE)
    with_bias.bias.fill_(3)
    x = draw(2, 6, 16)
    got = cuda_modulate.add_modulate(x, Addition(x, gate), with_bias, scale, shift)
    close(got[1], modulate_reference.add_modulate(x, Addition(x, gate), with_bias, scale, shift)[1])
    angles = draw(2, 2)
    part = Heads(draw(1, 2, 3, 4, 8).transpose(3, 4), rms_norm(4, torch.float32), rms_norm(4, torch.float32))
    turned = (way.turn_heads([part], angles.cos(), angles.sin()) for way in (cuda_modulate, modulate_reference))
    assert all(torch.equal(mine, other) for mine, other in zip(*turned, strict=True))
    uneven = draw(2, 5, 32)[:, :3]
    assert torch.equal(cuda_modulate.swiglu(uneven, x[:, :3]), modulate_reference.swiglu(uneven, x[:, :3]))


def test_a_token_is_computed_alike_alone_and_among_others() -> None:
    x, delta, norm = draw(2, 4, 300), draw(2, 4, 300, seed=1), rms_norm(300, torch.float32)
    gate, scale, shift, *_ = vectors(2, 300, torch.float32)
    together = cuda_modulate.add_modulate(x, Addition(delta, gate, norm, True), norm, scale, shift)
    for row in range(2):
        one = slice(row, row + 1)
        for token in range(4):
            own = slice(token, token + 1)
            addition = Addition(delta[one, own], gate[one], norm, True)
            alone = cuda_modulate.add_modulate(x[one, own], addition, norm, scale[one], shift[one])
            assert all(torch.equal(a[one, own], b) for a, b in zip(together, alone, strict=True))


def test_nan_stays_nan() -> None:
    x = draw(1, 2, 32, dtype=torch.bfloat16)
    x[0, 0, 3] = torch.nan
    got = cuda_modulate.modulate(x, layer_norm(32, torch.bfloat16), None)
    assert got.isnan().all(2).tolist() == [[True, False]]
    assert cuda_modulate.swiglu(x, x).isnan().sum() == 2
