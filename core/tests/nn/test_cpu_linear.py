"""Prepacked products: right for every batch, and never used where they cannot be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mstar.nn import cpu_linear
from mstar.nn.linear import LMHead, RowLinear, VocabEmbedding

DTYPES = [torch.float32, torch.bfloat16]


class Tiny(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.embed = VocabEmbedding(40, 48)
        self.plain, self.biased = RowLinear(48, 80), RowLinear(80, 48, bias=True)
        self.head = LMHead(48, 40, tied=self.embed)
        self.to(dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.biased(self.plain(self.embed(ids))))  # type: ignore[no-any-return]


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """Forget what has been measured, before and after."""
    measured = (cpu_linear._seconds, cpu_linear.prepacked_wins, cpu_linear.best_cpu_dtype)
    for function in measured:
        function.cache_clear()
    yield
    for function in measured:
        function.cache_clear()


def needs_prepacking(dtype: torch.dtype) -> None:
    fault = cpu_linear._fault(dtype)
    if fault:
        pytest.skip(f"no prepacked weights on this CPU: {fault}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 200])
def test_same_results_for_any_batch(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_prepacking(dtype)
    monkeypatch.setattr(cpu_linear, "prepacked_wins", lambda dtype, by: True)
    module, ids = Tiny(dtype), torch.arange(rows) % 40
    with torch.inference_mode():
        want = module(ids)
        assert cpu_linear.prepare_cpu(module) == 3
        got = module(ids)
        assert torch.equal(module(ids.view(1, -1))[0], got)  # any leading shape
    tolerance = 1e-5 if dtype == torch.float32 else 0.02 * want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_originals_are_freed_unless_shared(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_prepacking(dtype)
    monkeypatch.setattr(cpu_linear, "prepacked_wins", lambda dtype, by: True)
    module = Tiny(dtype)
    cpu_linear.prepare_cpu(module)
    assert module.plain.weight.numel() == module.biased.weight.numel() == 0
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.shape == (40, 48)
    assert cpu_linear.prepare_cpu(module) == 0  # a second time changes nothing


def test_a_shared_weight_is_copied_only_for_a_real_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_prepacking(torch.float32)
    monkeypatch.setattr(cpu_linear, "_seconds", lambda dtype: (1.2, 1.0))
    cpu_linear.prepacked_wins.cache_clear()
    module = Tiny(torch.float32)
    assert cpu_linear.prepare_cpu(module) == 2
    assert module.head.product is None
    cpu_linear.prepacked_wins.cache_clear()


def test_without_the_private_operators_nothing_changes(fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> object:
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu_linear, "_ops", gone)
    monkeypatch.setattr(cpu_linear, "_PROBE_BYTES", 1)
    module, ids = Tiny(torch.float32), torch.arange(5)
    want = module(ids)
    assert cpu_linear.prepare_cpu(module) == 0
    assert torch.equal(module(ids), want)


def test_wrong_results_are_noticed(fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear.PackedProduct, "__init__", lambda self, weight: None)
    monkeypatch.setattr(cpu_linear.PackedProduct, "__call__", lambda self, x, bias: x.new_zeros(len(x), len(bias)))
    assert cpu_linear._fault(torch.float32) == "its results differ from F.linear's"


def test_probe_leaves_threads_and_random_state_alone(fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_PROBE_BYTES", 1)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert cpu_linear.best_cpu_dtype() in DTYPES
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
