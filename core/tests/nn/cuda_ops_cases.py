"""The Triton kernels against the plain torch operations in float32, from the same rounded inputs.

Run by ``test_cuda_cases.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
them there.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn.ops import HeadNorms, ahead, cuda, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value. The interpreter cuts bfloat16 off where a GPU rounds to nearest.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}

# numpy, which interprets the kernels, warns where a GPU computes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(got: Tensor, exact: Tensor) -> None:
    limit = ROUNDING[got.dtype]
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(got.float(), exact.float(), rtol=limit, atol=limit * largest / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 2048), (3, 250), (70 if DEVICE == "cuda" else 9, 64)])
@pytest.mark.parametrize("added", [False, True])
def test_add_rms_norm(dtype: torch.dtype, rows: int, size: int, added: bool) -> None:
    stream, weight = draw(rows, size, dtype=dtype, scale=1e-1), draw(size, dtype=dtype)
    delta = draw(rows, size + 3, dtype=dtype)[:, :size] if added else None  # a slice of something wider
    before = stream.clone()
    got = cuda.add_rms_norm(stream, delta, weight, 1e-4)
    if delta is None or dtype is not torch.bfloat16 or not INTERPRETED:
        assert torch.equal(stream, before if delta is None else before + delta)
    else:
        close(stream, before + delta)
    close(got, reference.add_rms_norm(stream.float(), None, weight.float(), 1e-4))
    assert got.dtype == dtype
    assert got.is_contiguous()


@triton.jit
def _places(out, lines, of_row, of_part, row, part, turn: tl.constexpr, each: tl.constexpr):
    number = tl.program_id(0)
    at = number * turn + tl.arange(0, turn)
    tl.store(out + at, ahead.places(number, lines, of_row, of_part, row, part, turn, each))


@pytest.mark.parametrize(("n", "k", "parts"), [(24, 1536, 1), (24, 1536, 4), (7, 64, 1), (3, 200, 1)])
def test_lines_are_asked_for_from_the_beginning_of_each_part_of_each_row(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, parts: int
) -> None:
    monkeypatch.setattr(ahead, "BYTES", 24 * 1100)
    asked = ahead.choose(draw(n, k, dtype=torch.bfloat16), parts)
    assert asked is not None
    out = torch.full((asked.programs(1) * ahead.lines_of(1),), -1, device=DEVICE)
    _places[(asked.programs(1),)](out, *asked[1:], ahead.lines_of(1), ahead.LINE // 2, num_warps=1)
    of_part = min(1100 if n == 24 else k * 2, k * 2) // (ahead.LINE * parts)
    want = [
        row * k + part * (k // parts) + line * 64
        for row in range(n)
        for part in range(parts)
        for line in range(of_part)
    ]
    assert out[: len(want)].tolist() == want
    assert set(out[len(want) :].tolist()) <= {want[-1]}


def test_nothing_is_asked_of_a_weight_of_which_a_row_would_get_no_line() -> None:
    assert ahead.choose(draw(ahead.BYTES // 100, 2, dtype=torch.bfloat16), 1) is None
    assert ahead.choose(draw(8, 40, dtype=torch.bfloat16), 1) is None
    assert ahead.choose(draw(0, 512, dtype=torch.bfloat16), 1) is None


def test_what_follows_changes_no_result() -> None:
    stream, delta, weight = draw(5, 512), draw(5, 512), draw(512)
    following = draw(300, 512, dtype=torch.bfloat16)
    assert (ahead.plan(following, 5) is None) == INTERPRETED
    assert ahead.plan(following, ahead.ROWS + 1) is None
    want = cuda.add_rms_norm(stream.clone(), delta, weight, 1e-5)
    assert torch.equal(cuda.add_rms_norm(stream.clone(), delta, weight, 1e-5, following=following), want)
    assert torch.equal(cuda.silu_mul(stream, following), cuda.silu_mul(stream))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 3])
def test_a_norm_adds_up_the_parts_of_a_product(dtype: torch.dtype, parts: int) -> None:
    stream, weight, delta = draw(5, 96, dtype=dtype), draw(96, dtype=dtype), draw(parts, 5, 96)
    want = stream.float() + delta.sum(0)
    got = cuda.add_rms_norm(stream, delta, weight, 1e-5)
    close(stream, want)
    close(got, reference.add_rms_norm(stream.float(), None, weight.float(), 1e-5))
    same = draw(5, 96, dtype=dtype).float()
    close(got, reference.add_rms_norm(same, delta, weight.float(), 1e-5))
    torch.testing.assert_close(same, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stream_in_float32_keeps_its_precision(dtype: torch.dtype) -> None:
    stream, delta, weight = draw(5, 96), draw(5, 96, dtype=dtype), draw(96, dtype=dtype)
    before = stream.clone()
    got = cuda.add_rms_norm(stream, delta, weight, 1e-5)
    assert torch.equal(stream, before + delta.float())
    close(got, reference.add_rms_norm(stream.clone(), None, weight.float(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norms_weight_in_float32_is_not_rounded(dtype: torch.dtype) -> None:
    stream, weight = draw(5, 96, dtype=dtype), 1 + draw(96) / 300  # what bfloat16 has few values for
    got = cuda.add_rms_norm(stream, None, weight, 1e-5, dtype)
    assert got.dtype == dtype
    close(got, reference.add_rms_norm(stream.float(), None, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1280), (3, 250), (70 if DEVICE == "cuda" else 9, 64)])
@pytest.mark.parametrize("added", [False, True])
def test_add_layer_norm(dtype: torch.dtype, rows: int, size: int, added: bool) -> None:
    stream, weight, bias = draw(rows, size, dtype=dtype) + 5, draw(size, dtype=dtype), draw(size, dtype=dtype)
    delta = draw(rows, size + 3, dtype=dtype)[:, :size] if added else None
    before = stream.clone()
    got = cuda.add_layer_norm(stream, delta, weight, bias, 1e-4)
    if delta is None or dtype is not torch.bfloat16 or not INTERPRETED:
        assert torch.equal(stream, before if delta is None else before + delta)
    else:
        close(stream, before + delta)
    close(got, reference.add_layer_norm(stream.float(), None, weight.float(), bias.float(), 1e-4))
    assert got.dtype == dtype
    assert got.is_contiguous()


def test_a_layer_norm_keeps_small_differences_beside_a_large_mean() -> None:
    stream, one = draw(3, 500) + 1000, torch.ones(500, device=DEVICE)
    got = cuda.add_layer_norm(stream, None, one, 0 * one, 1e-5)
    exact = reference.add_layer_norm(stream.double(), None, one.double(), 0 * one.double(), 1e-5)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-4)


def test_norms_of_other_shapes_go_to_the_reference() -> None:
    heads, weight = draw(3, 4, 16), draw(16)
    got = cuda.add_layer_norm(heads, heads, weight, weight, 1e-5)
    close(got, reference.add_layer_norm(2 * draw(3, 4, 16), None, weight, weight, 1e-5))
    heads = draw(3, 4, 16)
    got = cuda.add_rms_norm(heads[:, 1:3], None, weight, 1e-5)
    close(got, reference.add_rms_norm(heads[:, 1:3].contiguous(), None, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1100), (7, 101), (70 if DEVICE == "cuda" else 9, 32)])
def test_silu_mul(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = draw(rows, 2 * size + 5, dtype=dtype, scale=4)[:, : 2 * size]
    if rows:
        gate_up[0, :6] = torch.tensor([0, 300, -300, torch.inf, 88, -88]).to(gate_up)
    exact = reference.silu_mul(gate_up.double())
    torch.testing.assert_close(cuda.silu_mul(gate_up).double(), exact, rtol=ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1100), (7, 101)])
def test_sigmoid_mul(dtype: torch.dtype, rows: int, size: int) -> None:
    x, gate = draw(rows, size + 3, dtype=dtype)[:, :size], draw(rows, size + 5, dtype=dtype, scale=4)[:, :size]
    if rows:
        gate[0, :5] = torch.tensor([0, 300, -300, 88, -88]).to(gate)
    got = cuda.sigmoid_mul(x, gate)
    assert got.dtype == dtype
    exact = reference.sigmoid_mul(x.double(), gate.double())
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_over_several_axes(dtype: torch.dtype) -> None:
    inverse = torch.linspace(0.5, 0, 20).to(DEVICE)
    axes = (torch.arange(20) % 3).to(DEVICE)
    positions = torch.randint(0, 5000, (3, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for given in (positions, torch.cat((positions, positions), 1)[:, :7]):  # rows with gaps
        got = cuda.rotation(given, inverse, 1.3, dtype, axes)
        for mine, exact in zip(got, reference.rotation(positions, inverse, 1.3, torch.float32, axes), strict=True):
            close(mine, exact)
            assert mine.shape == (7, 1, 20)
    for element in range(20):
        alone = reference.rotation(positions[axes[element]], inverse[element : element + 1], 1.3, dtype)
        assert torch.equal(alone[0][:, :, 0], reference.rotation(positions, inverse, 1.3, dtype, axes)[0][..., element])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rotation(dtype: torch.dtype, size: int, scale: float) -> None:
    frequencies = 1 / 500_000 ** (torch.arange(size // 2) / (size // 2))
    inverse = torch.cat((-frequencies, frequencies)).to(DEVICE)
    positions = torch.tensor([0, 1, 77, 4095, 131_071], device=DEVICE)
    for integers in (torch.int64, torch.int32):
        got = cuda.rotation(positions.to(integers), inverse, scale, dtype)
        for mine, exact in zip(got, reference.rotation(positions, inverse, scale, torch.float32), strict=True):
            close(mine, exact)
            assert mine.shape == (5, 1, size)
            assert mine.dtype == dtype
            assert mine.is_contiguous()


def rotation(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inverse = torch.cat((-torch.ones(size // 2), torch.ones(size // 2))) * 0.37
    return reference.rotation(torch.arange(rows), inverse, 1.0, dtype)


def exact_store(
    heads: Tensor, q_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = None if norms is None else HeadNorms(norms.q.float(), norms.k.float(), norms.eps)
    return reference.rotate_store(heads.float(), q_heads, cos.float(), sin.float(), wide, None, None, None)


@pytest.mark.parametrize("normed", [False, True, torch.float32])  # the last: weights in float32
@pytest.mark.parametrize(
    ("rows", "q_heads", "kv_heads", "size", "dtype", "kept_as"),
    [
        (1, 6, 2, 128, torch.bfloat16, torch.bfloat16),
        (5, 3, 1, 80, torch.float16, torch.float16),
        (3, 4, 4, 64, torch.float32, torch.float32),
        (2, 2, 1, 256, torch.bfloat16, torch.float32),
        (7, 9, 3, 12, torch.float32, torch.float16),
    ],
)
def test_rotate_store(
    normed: object, rows: int, q_heads: int, kv_heads: int, size: int, dtype: torch.dtype, kept_as: torch.dtype
) -> None:
    count = q_heads + 2 * kv_heads
    heads = draw(rows, (count + 1) * size, dtype=dtype)[:, : count * size].view(rows, count, size)  # rows have gaps
    cos, sin = (each.to(DEVICE) for each in rotation(rows, size, dtype))
    kind = normed if isinstance(normed, torch.dtype) else dtype
    norms = HeadNorms(draw(size, dtype=kind), draw(size + 1, dtype=kind)[:size], 1e-5) if normed else None
    want = exact_store(heads, q_heads, cos, sin, norms)
    places = torch.randperm(rows + 4, generator=torch.Generator().manual_seed(1))[:rows].to(DEVICE)
    keys, values = (draw(rows + 4, kv_heads * size, dtype=kept_as) for _ in range(2))
    untouched = torch.ones(rows + 4, dtype=torch.bool, device=DEVICE).index_fill(0, places, False)
    before = keys[untouched].clone(), values[untouched].clone()
    got = cuda.rotate_store(heads, q_heads, cos, sin, norms, keys, values, places)
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape
        close(mine, exact)
    assert got[0].is_contiguous()
    assert torch.equal(keys[places], got[1].reshape(rows, -1).to(kept_as))
    assert torch.equal(values[places], got[2].reshape(rows, -1).to(kept_as))
    assert torch.equal(keys[untouched], before[0])
    assert torch.equal(values[untouched], before[1])


def test_rotate_store_without_places_stores_nothing() -> None:
    heads, (cos, sin) = draw(3, 8, 16), (each.to(DEVICE) for each in rotation(3, 16, torch.float32))
    want = exact_store(heads, 4, cos, sin, None)
    keys, values = torch.zeros(4, 32, device=DEVICE), torch.zeros(4, 32, device=DEVICE)
    for memory in ((None, None), (keys, values)):
        for mine, exact in zip(cuda.rotate_store(heads.clone(), 4, cos, sin, None, *memory, None), want, strict=True):
            close(mine, exact)
    assert not keys.any()
    assert not values.any()
    assert cuda.rotate_store(heads[:0], 4, cos[:0], sin[:0], None, None, None, None)[0].shape == (0, 4, 16)


def test_what_a_kernel_does_not_take_goes_to_the_reference() -> None:
    odd = draw(3, 8, 16).transpose(1, 2).contiguous().transpose(1, 2)  # elements of a head are not neighbours
    cos, sin = (each.to(DEVICE) for each in rotation(3, 16, torch.float32))
    want = exact_store(odd, 4, cos, sin, None)
    for mine, exact in zip(cuda.rotate_store(odd.clone(), 4, cos, sin, None, None, None, None), want, strict=True):
        close(mine, exact)
    double = draw(2, 8).double()
    assert torch.equal(cuda.silu_mul(double), reference.silu_mul(double))


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_rows(dtype: torch.dtype) -> None:
    fused, places = draw(6, 5, 8, dtype=dtype), torch.tensor([11, 3, 0, 7, 8, 9], device=DEVICE)
    turned = fused.transpose(0, 1).contiguous().transpose(0, 1)  # heads of a row lie apart
    for source in (fused, turned):
        got, want = ([torch.zeros(12, 16, dtype=dtype, device=DEVICE) for _ in range(2)] for _ in range(2))
        cuda.store_rows(*got, places, source[:, 1:3], source[:, 3:])
        reference.store_rows(*want, places, source[:, 1:3], source[:, 3:])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_row_is_computed_alike_alone_and_among_others() -> None:
    stream, delta, weight = draw(9, 300), draw(9, 300), draw(300)
    gate_up, heads, (cos, sin) = draw(9, 400), draw(9, 6, 16), (x.to(DEVICE) for x in rotation(9, 16, torch.float32))
    together = (
        cuda.add_rms_norm(stream.clone(), delta, weight, 1e-5),
        cuda.silu_mul(gate_up),
        cuda.rotate_store(heads.clone(), 2, cos, sin, HeadNorms(weight[:16], weight[16:32], 1e-5), None, None, None)[0],
    )
    for row in range(9):
        one = slice(row, row + 1)
        norms = HeadNorms(weight[:16], weight[16:32], 1e-5)
        alone = (
            cuda.add_rms_norm(stream[one].clone(), delta[one], weight, 1e-5),
            cuda.silu_mul(gate_up[one]),
            cuda.rotate_store(heads[one].clone(), 2, cos[one], sin[one], norms, None, None, None)[0],
        )
        assert all(torch.equal(a[one], b) for a, b in zip(together, alone, strict=True))


def test_nan_stays_nan() -> None:
    gate_up = draw(2, 32, dtype=torch.bfloat16)
    gate_up[0, 3] = torch.nan
    assert cuda.silu_mul(gate_up).isnan().sum() == 1
    assert cuda.add_rms_norm(gate_up, None, draw(32, dtype=torch.bfloat16), 1e-5).isnan().all(1).tolist() == [
        True,
        False,
    ]
