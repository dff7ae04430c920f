"""Group norm with channels last against plain torch in float32. Run as ``cuda_ops_cases.py`` is."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.ops import cuda_groupnorm, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Of the largest value. The interpreter cuts bfloat16 off where a GPU rounds to nearest.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-10}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def picture(rows: int, channels: int, *size: int, dtype: torch.dtype = torch.float32, middle: float = 0.0) -> Tensor:
    """Noise around *middle*, louder in later channels, with channels last."""
    drawn = torch.randn(rows, *size, channels, generator=torch.Generator().manual_seed(channels + sum(size)))
    drawn = drawn * torch.linspace(0.5, 2, channels) + middle
    return drawn.to(dtype).to(DEVICE).movedim(-1, 1)


def affine(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(channels)
    weight, bias = torch.randn(2, channels, generator=draw).to(dtype).to(DEVICE)
    return weight, bias


def exact(x: Tensor, groups: int, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    normed = F.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-6)
    return (F.silu(normed) if silu else normed).float()


def close(got: Tensor, right: Tensor) -> None:
    limit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.float(), right, rtol=limit, atol=limit * right.abs().max().item())


@pytest.mark.parametrize(("dtype", "silu"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize(
    ("rows", "channels", "groups", "size"),
    [(1, 128, 4, (20, 13)), (2, 12, 4, (9, 11)), (2, 8, 2, (1, 1)), (1, 24, 3, (777,)), (1, 512, 2, (5, 7))],
)
def test_group_norm(
    dtype: torch.dtype, silu: bool, rows: int, channels: int, groups: int, size: tuple[int, ...]
) -> None:
    x, (weight, bias) = picture(rows, channels, *size, dtype=dtype), affine(channels, dtype)
    kept = x.clone()
    got = cuda_groupnorm.group_norm(x, groups, weight, bias, 1e-6, silu)
    close(got, exact(x, groups, weight, bias, silu))
    assert (got.dtype, got.shape, got.stride()) == (dtype, x.shape, x.stride())
    assert torch.equal(x, kept)


def test_many_pieces_are_joined_in_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of several tiles, the last of them ragged, and more of them than are joined at a time."""
    monkeypatch.setattr(cuda_groupnorm, "_TILE", 64)
    monkeypatch.setattr(cuda_groupnorm, "_PIECES", 40)
    monkeypatch.setattr(cuda_groupnorm, "_JOINED", 16)
    x, (weight, bias) = picture(1, 16, 31, 17), affine(16)
    close(cuda_groupnorm.group_norm(x, 2, weight, bias, 1e-6, True), exact(x, 2, weight, bias, True))


def test_far_from_nought_nothing_is_lost() -> None:
    """A mean a thousand times the deviation: differences of large sums would lose all of it."""
    x, (weight, bias) = picture(1, 32, 24, 24, middle=1000.0), affine(32)
    right = exact(x, 2, weight, bias, False)
    got = cuda_groupnorm.group_norm(x, 2, weight, bias, 1e-6, False)
    assert (got - right).abs().max() < 1e-3 * right.abs().max()


def test_a_row_is_the_same_in_any_step() -> None:
    x, (weight, bias) = picture(3, 64, 13, 9, dtype=torch.bfloat16), affine(64)
    together = cuda_groupnorm.group_norm(x, 2, weight, bias, 1e-6, True)
    for row in range(3):
        alone = cuda_groupnorm.group_norm(x[row : row + 1], 2, weight, bias, 1e-6, True)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_before_the_norm(dtype: torch.dtype) -> None:
    """Larger than what it is added to: the moments are those of the sum."""
    x, (weight, bias), (added, _) = picture(2, 24, 31, 17, dtype=dtype), affine(24, dtype), affine(24, dtype)
    added = added * 8
    summed = x.double() + added.double().view(1, -1, 1, 1)
    got = cuda_groupnorm.group_norm(x, 3, weight, bias, 1e-6, True, added)
    close(got, exact(summed, 3, weight, bias, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 1), (31, 17)])
def test_pictures_and_a_number_a_channel_are_added(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    x, y = picture(2, 24, *size, dtype=dtype), picture(2, 24, *size, dtype=dtype, middle=3.0)
    (added, _) = affine(24, dtype)
    got = cuda_groupnorm.add_channels(x, y, added)
    close(got, (x.double() + y.double() + added.double().view(1, -1, 1, 1)).float())
    assert got.stride() == x.stride()


@pytest.mark.parametrize("x", [torch.randn(2, 8, 5, 5), torch.randn(0, 8, 5, 5), torch.randn(1, 8, 0, 5)])
def test_what_has_other_strides_or_no_points_goes_to_the_reference(x: Tensor) -> None:
    x, (weight, bias) = x.to(DEVICE), affine(8)
    got = cuda_groupnorm.group_norm(x, 2, weight, bias, 1e-6, True, bias)
    assert torch.equal(got, reference.group_norm(x, 2, weight, bias, 1e-6, True, bias))
    assert torch.equal(cuda_groupnorm.add_channels(x, x, bias), reference.add_channels(x, x, bias))
