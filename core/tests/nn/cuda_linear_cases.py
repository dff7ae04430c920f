"""Linear layers in Triton against float64, from the same rounded inputs. Run as ``cuda_ops_cases.py`` is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mstar.nn.ops import cuda_linear, cuda_linear_table
from mstar.nn.ops.cuda_linear_table import Cut, Key

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
BF16, F16 = torch.bfloat16, torch.float16
SIZES = [(256, 128, BF16), (144, 272, BF16), (144, 272, F16)]  # 144 × 272 fills no block
CUTS = {
    1: [Cut(32, 128), Cut(64, 256, warps=1)],
    4: [Cut(32, 64), Cut(32, 64, split=2, stages=3), Cut(64, 32, split=4), Cut(16, 32, stages=3, narrow=True)],
}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def _ours_up_to_16_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sizes here were never measured."""
    monkeypatch.setattr(cuda_linear_table, "UNMEASURED", 16)
    cuda_linear_table.config.cache_clear()
    yield
    cuda_linear_table.config.cache_clear()


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> object:
    """``cut(layer, rows' cut)``: how any layer is cut from now on."""

    def force(chosen: Cut) -> None:
        monkeypatch.setattr(cuda_linear, "config", lambda key: chosen)
        monkeypatch.setattr(cuda_linear, "default", lambda key: chosen)

    return force


def close(got: Tensor, exact: Tensor) -> None:
    """*exact* within one rounding of the dtype, and float32's of a sum; the interpreter cuts bfloat16 off, twice."""
    limit = {torch.bfloat16: 2**-6 if INTERPRETED else 2**-7, torch.float16: 2**-10}[got.dtype]
    torch.testing.assert_close(got.double(), exact, rtol=limit, atol=limit * exact.abs().max().item() / 2)


def normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


CASES = [
    *itertools.product([1], CUTS[1]), *itertools.product([3], CUTS[4]), *itertools.product([18], CUTS[4][1::2]),
]  # fmt: skip


@pytest.mark.parametrize(("n", "k", "dtype"), SIZES)
@pytest.mark.parametrize(("rows", "chosen"), CASES)
def test_every_kind_of_layer(n: int, k: int, dtype: torch.dtype, rows: int, chosen: Cut, cut: object) -> None:
    cut(chosen)  # type: ignore[operator]
    x = draw(rows, k + 8, dtype=dtype)[:, :k]  # a slice of something wider
    weight, bias, norm = draw(n, k, dtype=dtype, scale=0.1), draw(n, dtype=dtype), draw(k, dtype=dtype)
    stream = draw(rows, n, dtype=dtype)
    wide, biased = x.double() @ weight.double().T, bias.double()

    plain, with_bias = cuda_linear.linear(x, weight, None), cuda_linear.linear(x, weight, bias)
    assert plain is not None
    assert with_bias is not None
    close(plain, wide)
    close(with_bias, wide + biased)

    added = stream.clone()
    assert cuda_linear.add_linear(added, x, weight, bias)
    close(added, stream.double() + wide + biased)

    before = x.clone()
    exact = normed(x, norm, 1e-3) @ weight.double().T
    precise = norm.float() + 1e-3  # more than the layer's dtype has numbers for
    close(cuda_linear.norm_linear(x, precise, 1e-3, weight, None), normed(x, precise, 1e-3) @ weight.double().T)
    after = cuda_linear.norm_linear(x, norm, 1e-3, weight, bias)
    assert after is not None
    close(after, exact + biased)
    activated = cuda_linear.norm_gate_up(x, norm, 1e-3, weight, None)
    assert activated is not None
    assert activated.shape == (rows, n // 2)
    close(activated, gated(exact))
    assert torch.equal(x, before)
    for counters in cuda_linear._lines.values():
        assert not counters.any()


FEW = [Cut(32, 32, 1, 3), Cut(32, 32, 4, 3), Cut(16, 32, 1, 3, narrow=True), Cut(32, 16, 1, 2, 8, narrow=True)]


@pytest.mark.parametrize("chosen", FEW)
def test_a_row_is_the_same_in_any_batch_of_its_class(chosen: Cut, cut: object) -> None:
    cut(chosen)  # type: ignore[operator]
    x, weight, norm = draw(14, 256), draw(160, 256), draw(256)
    for most, others in ((14, (9, 13)), (8, (5,))):
        together = cuda_linear.norm_gate_up(x[-most:], norm, 1e-5, weight, None)
        assert together is not None
        for rows in others:
            some = cuda_linear.norm_gate_up(x[-rows:], norm, 1e-5, weight, None)
            assert some is not None
            assert torch.equal(some, together[-rows:])


@pytest.mark.parametrize("chosen", FEW)
def test_two_to_sixteen_rows(chosen: Cut, cut: object) -> None:
    """Of a layer that fills no block; those that are not there leave no trace."""
    cut(chosen)  # type: ignore[operator]
    weight, norm = draw(144, 272, scale=0.1), draw(272)
    for rows in (7, 16) if INTERPRETED else range(2, 17):
        x, stream = draw(rows, 272), draw(rows + 1, 144)
        added = stream.clone()
        assert cuda_linear.add_linear(added[:rows], x, weight, None)
        close(added[:rows], stream[:rows].double() + x.double() @ weight.double().T)
        assert torch.equal(added[rows], stream[rows])
        activated = cuda_linear.norm_gate_up(x, norm, 1e-5, weight, None)
        assert activated is not None
        close(activated, gated(normed(x, norm, 1e-5) @ weight.double().T))


@pytest.mark.skipif(INTERPRETED, reason="graphs are a GPU's")
@pytest.mark.parametrize("chosen", FEW)
def test_captured_layers_give_the_same_in_every_replay(chosen: Cut, cut: object) -> None:
    cut(chosen)  # type: ignore[operator]
    x, norm, weights = draw(8, 2560), draw(2560), [draw(2560, 2560, scale=0.02) for _ in range(4)]

    def run() -> Tensor:
        out = x.clone()
        for weight in weights:
            hidden = cuda_linear.norm_linear(out, norm, 1e-5, weight, None)
            assert hidden is not None
            assert cuda_linear.add_linear(out, hidden, weight, None)
        return out

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        plain = run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(100):
        out.zero_()
        graph.replay()
        assert torch.equal(out, plain)


def test_deterministic_layers_give_a_row_the_same_alone_and_in_a_prompt() -> None:
    x, weight = draw(70, 256), draw(128, 256, scale=0.1)
    norm = draw(256)
    together = cuda_linear.norm_linear(x, norm, 1e-5, weight, None, True)
    assert together is not None
    close(together, normed(x, norm, 1e-5) @ weight.double().T)
    for part in (slice(3, 4), slice(66, 70)):
        some = cuda_linear.norm_linear(x[part], norm, 1e-5, weight, None, True)
        assert some is not None
        assert torch.equal(some, together[part])


@pytest.mark.parametrize(("n", "k"), [(40, 48), (128, 512)])
def test_deterministic_layers_of_any_size(n: int, k: int) -> None:
    """Small ones too; with its input features divided or not."""
    x, weight, bias, stream = draw(67, k), draw(n, k, scale=0.1), draw(n), draw(67, n)
    together = cuda_linear.linear(x, weight, bias, True)
    assert together is not None
    close(together, x.double() @ weight.double().T + bias.double())
    added = stream.clone()
    assert cuda_linear.add_linear(added, x, weight, bias, True)
    for row in (0, 65):
        own = slice(row, row + 1)
        alone, alone_added = cuda_linear.linear(x[own], weight, bias, True), stream[own].clone()
        assert alone is not None
        assert torch.equal(alone, together[own])
        assert cuda_linear.add_linear(alone_added, x[own], weight, bias, True)
        assert torch.equal(alone_added, added[own])


def test_what_deterministic_layers_refuse() -> None:
    assert cuda_linear.refuses(draw(40, 48), draw(40)) is None
    assert "float32" in (cuda_linear.refuses(draw(40, 48).float(), None) or "")
    assert "not a multiple of 16" in (cuda_linear.refuses(draw(40, 50), None) or "")
    assert "not one plain matrix" in (cuda_linear.refuses(draw(40, 48).T, None) or "")


def test_what_the_kernels_do_not_take() -> None:
    x, weight = draw(2, 256), draw(128, 256)
    assert cuda_linear.linear(x, weight, None) is not None
    assert cuda_linear.linear(x.float(), weight.float(), None) is None
    assert cuda_linear.linear(x, weight.float(), None) is None
    assert cuda_linear.linear(x[None], weight, None) is None
    assert cuda_linear.linear(x[:0], weight, None) is None
    assert cuda_linear.linear(x[:, :250], weight[:, :250].contiguous(), None) is None
    assert cuda_linear.linear(x.T.contiguous().T, weight, None) is None
    assert cuda_linear.linear(draw(65, 256), weight, None) is None
    assert not cuda_linear.add_linear(draw(2, 128).float(), x, weight, None)

    class Packed(torch.Tensor):
        pass

    assert cuda_linear.linear(x, weight.as_subclass(Packed), None) is None


def test_sizes_that_were_measured_slower_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_linear_table.TUNED, Key(128, 272, False, 4), None)
    cuda_linear_table.config.cache_clear()
    x, weight = draw(3, 272), draw(128, 272)
    assert cuda_linear.linear(x, weight, None) is None
    assert cuda_linear.linear(x[:1], weight, None) is not None
    assert cuda_linear.norm_gate_up(x, draw(272), 1e-5, weight, None) is not None
    cuda_linear_table.config.cache_clear()


@pytest.mark.skipif(INTERPRETED, reason="torch multiplies 16-bit matrices into float32 on CUDA only")
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_parts_of_a_divided_product_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(cuda_linear_table.DIVIDED, (128, 768), ((20, 3), (40, 2)))
    weight = draw(128, 768, dtype=dtype)
    for rows, parts in ((1, 3), (20, 3), (21, 2), (40, 2)):
        x = draw(rows, 800, dtype=dtype)[:, :768]
        got = cuda_linear.divided_linear(x, weight)
        assert got is not None
        assert got.shape == (parts, rows, 128)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.sum(0), x.float() @ weight.float().T, rtol=1e-3, atol=1e-2)
        each = x[:, : 768 // parts].float() @ weight[:, : 768 // parts].float().T
        torch.testing.assert_close(got[0], each, rtol=1e-3, atol=1e-2)


def test_products_are_divided_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda_linear_table.DIVIDED, (128, 768), ((20, 3), (40, 2)))
    assert [cuda_linear_table.divided(128, 768, rows) for rows in (1, 20, 21, 40, 41)] == [3, 3, 2, 2, None]
    weight = draw(128, 768)
    assert cuda_linear.divided_linear(draw(41, 768), weight) is None
    assert cuda_linear.divided_linear(draw(4, 768, dtype=torch.float32), weight) is None
    assert cuda_linear.divided_linear(draw(4, 768), draw(768, 128).T) is None
    assert cuda_linear.divided_linear(draw(4, 256), draw(128, 256)) is None


def test_the_tables_parts_are_whole_steps() -> None:
    for (n, k), ways in cuda_linear_table.DIVIDED.items():
        assert [most for most, _ in ways] == sorted({most for most, _ in ways}), (n, k)
        assert all(parts > 1 and k % (64 * parts) == 0 for _, parts in ways), (n, k)
