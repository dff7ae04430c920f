"""The CPU's kernels against the plain torch operations, which are computed in float32 from the same rounded inputs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.ops import cpu, jit, reference

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # of the largest value: one rounding and a little more


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(got: Tensor, exact: Tensor) -> None:
    limit = ROUNDING[got.dtype]
    torch.testing.assert_close(got.float(), exact, rtol=limit, atol=limit * exact.abs().max().item())


def test_the_kernels_are_in_use_here() -> None:
    assert ops.cpu_kernels_fault() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 600])  # the last is shared between threads
@pytest.mark.parametrize("added", [False, True])
def test_add_rms_norm(dtype: torch.dtype, rows: int, added: bool) -> None:
    if rows == 0:
        assert ops.add_rms_norm(draw(0, 8), None, draw(8, dtype=dtype), 1e-5).shape == (0, 8)
        return
    residual, weight = draw(rows, 250, scale=1e-2), draw(250, dtype=dtype)
    delta = draw(rows, 250, dtype=dtype) if added else None
    stream = residual.clone()
    got = ops.add_rms_norm(stream, delta, weight, 1e-4)
    wide = None if delta is None else delta.float()
    close(got, reference.add_rms_norm(residual, wide, weight.float(), 1e-4))
    assert torch.equal(stream, residual)  # both were added to
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 700])
def test_silu_mul(dtype: torch.dtype, rows: int) -> None:
    gate_up = draw(rows, 2 * 101, dtype=dtype, scale=4)
    gate_up[0, :6] = torch.tensor([0, 300, -300, torch.inf, 88, -88]).to(dtype)
    got = ops.silu_mul(gate_up)
    exact = reference.silu_mul(gate_up.double())
    torch.testing.assert_close(got.double(), exact, rtol=ROUNDING[dtype], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turning", [2, 5])
def test_rotate_leaves_other_heads_alone(dtype: torch.dtype, turning: int) -> None:
    angles = draw(9, 6)
    cos = torch.cat((angles.cos(), angles.cos()), 1).unsqueeze(1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).unsqueeze(1).to(dtype)
    heads = draw(9, 5, 12, dtype=dtype)
    exact, rest = reference.rotate(heads.float(), turning, cos.float(), sin.float()), heads[:, turning:].clone()
    close(ops.rotate(heads, turning, cos, sin), exact)
    assert torch.equal(heads[:, turning:], rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_rows_takes_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused, places = draw(6, 5, 8, dtype=dtype), torch.tensor([11, 3, 0, 7, 8, 9])
    got, want = ([torch.zeros(12, 16, dtype=dtype) for _ in range(2)] for _ in range(2))
    ops.store_rows(*got, places, fused[:, 1:3], fused[:, 3:])
    reference.store_rows(*want, places, fused[:, 1:3], fused[:, 3:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_rotate_store_is_norm_rotation_and_store(dtype: torch.dtype, normed: bool, stored: bool) -> None:
    heads, places = draw(5, 8, 12, dtype=dtype), torch.tensor([6, 0, 3, 1, 2])
    inverse = torch.cat((-torch.ones(6), torch.ones(6)))
    cos, sin = ops.rotation(torch.arange(5), inverse, 1.0, dtype)
    norms = ops.HeadNorms(draw(12, dtype=dtype), draw(12, dtype=dtype).flip(0), 1e-5) if normed else None
    q, k, v = heads[:, :4].float(), heads[:, 4:6].float(), heads[:, 6:].clone()
    if norms is not None:
        q, k = (reference.add_rms_norm(x, None, w.float(), 1e-5) for x, w in ((q, norms.q), (k, norms.k)))
    q, k = (reference.rotate(x, x.shape[1], cos.float(), sin.float()) for x in (q, k))
    keys, values = (torch.zeros(7, 24, dtype=dtype) for _ in range(2))
    got = ops.rotate_store(heads, 4, cos, sin, norms, keys, values, places if stored else None)
    factor = 4 if normed else 1  # a sequence of operations rounds more than once
    for mine, exact in zip(got[:2], (q, k), strict=True):
        torch.testing.assert_close(mine.float(), exact, rtol=factor * ROUNDING[dtype], atol=factor * ROUNDING[dtype])
    assert torch.equal(got[2], v)
    if stored:
        assert torch.equal(keys[places], got[1].flatten(1))
        assert torch.equal(values[places], v.flatten(1))
    assert bool(keys.any() or values.any()) == stored


def test_other_dtypes_go_to_the_reference() -> None:
    residual, weight = draw(3, 8, dtype=torch.float16), draw(8, dtype=torch.float16)
    assert torch.equal(
        ops.add_rms_norm(residual.clone(), None, weight, 1e-5), reference.add_rms_norm(residual, None, weight, 1e-5)
    )
    assert torch.equal(ops.silu_mul(residual), reference.silu_mul(residual))


def test_nan_stays_nan_in_bfloat16() -> None:
    odd = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.bfloat16)  # rounding would carry into the sign
    gate_up = torch.stack((odd, torch.ones(1, dtype=torch.bfloat16)), 1)
    assert ops.silu_mul(gate_up).isnan().all()
    assert ops.add_rms_norm(odd.float()[None], None, torch.ones(1, dtype=torch.bfloat16), 1e-5).isnan().all()


def test_threads_share_the_work_of_one_call() -> None:
    gate_up = draw(1000, 2 * 64)
    alone, shared = gate_up.new_empty(1000, 64), gate_up.new_empty(1000, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for parallel, out in ((False, alone), (True, shared)):
            cpu.kernels.silu_mul_kernels[0](parallel, gate_up.data_ptr(), out.data_ptr(), 1000, 64)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, shared)
    assert jit._team() is not None  # this torch's OpenMP library was found


def test_without_numba_torch_serves() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch; from mstar.nn import ops\n"
        "assert 'numba' in ops.cpu_kernels_fault()\n"
        "assert ops.silu_mul(torch.ones(1, 4)).tolist() == torch.nn.functional.silu(torch.ones(1, 2)).tolist()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plain torch operations are used" in done.stderr
