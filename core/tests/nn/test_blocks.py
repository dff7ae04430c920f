"""Single blocks against transformers' or plain float64 arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from mstar.nn import ops
from mstar.nn.config import ACTIVATIONS, DecoderConfig
from mstar.nn.decoder import DecoderStack, GatedMLP
from mstar.nn.encoder import EncoderStack
from mstar.nn.linear import QKVLinear
from mstar.nn.node import Step
from mstar.nn.norm import LayerNorm, OffsetRMSNorm, RMSNorm


def random_(module: nn.Module, seed: int = 2) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.3, 0.4, generator=generator)
    return module


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_equals_transformers(activation: str, bias: bool) -> None:
    config = LlamaConfig(
        hidden_size=12, intermediate_size=20, num_attention_heads=2, hidden_act=activation, mlp_bias=bias
    )
    reference, ours = random_(LlamaMLP(config)), GatedMLP(12, 20, activation, bias)
    with torch.no_grad():
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = [getattr(reference.gate_proj, kind), getattr(reference.up_proj, kind)]
            getattr(ours.gate_up_proj, kind).copy_(torch.cat(parts))
            getattr(ours.down_proj, kind).copy_(getattr(reference.down_proj, kind))
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scale", [1e-3, 1.0, 300.0]
)  # a small one lets eps count, a large one overflows float16 squared
def test_rms_norm_equals_transformers(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(7, 64, generator=torch.Generator().manual_seed(4)) * scale).to(dtype)
    reference, ours = random_(LlamaRMSNorm(64, 1e-5)), random_(RMSNorm(64, 1e-5))
    with torch.no_grad():
        exact = reference(x.float())  # what both should round to
        got = ours.to(dtype)(x) if dtype != torch.float32 else ours(x)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.float(), exact, rtol=tolerance, atol=tolerance)
    assert got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_norm_equals_transformers(dtype: torch.dtype) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    reference, ours = random_(Qwen3_5RMSNorm(64, 1e-5)), random_(OffsetRMSNorm(64, 1e-5, dtype))
    with torch.no_grad():
        ours.add_one()
        exact = reference(x.float())
        got = ours(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_grouped_heads_are_laid_out_query_first() -> None:
    layer = QKVLinear(8, heads=4, kv_heads=2, head_dim=3)
    assert layer.parts == {"q_proj": 12, "k_proj": 6, "v_proj": 6}
    assert layer.weight.shape == (24, 8)


class _Mixing:
    """Attention without memory: each token's queries, scaled."""

    def attend_heads(self, layer: int, heads: Tensor, q_heads: int, rotation: Any, norms: Any) -> Tensor:
        return heads[:, :q_heads] * (layer + 1)


class _Device:
    """What a device's kernels do, in torch, and which of them were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        for name in ("add_linear", "norm_linear", "norm_gate_up"):
            monkeypatch.setattr(ops, name, getattr(self, name))

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, alike: bool) -> bool:
        assert not alike
        self.calls.append("add_linear")
        residual.add_(F.linear(x, weight, bias))
        return True

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, alike: bool
    ) -> Tensor:
        assert not alike
        self.calls.append("norm_linear")
        return F.linear(F.rms_norm(x, norm.shape, norm, eps), weight, bias)

    def norm_gate_up(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, alike: bool
    ) -> Tensor:
        gate, up = self.norm_linear(x, norm, eps, weight, bias, alike).chunk(2, -1)
        self.calls[-1] = "norm_gate_up"
        return F.silu(gate) * up


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_take_in_what_stands_beside_them(
    activation: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(
        16, 8, 2, 2, 1, 4, 12, 32, activation=activation, qkv_bias=bias, o_bias=bias, mlp_bias=bias
    )  # fmt: skip
    stack = random_(DecoderStack(config))
    x, positions = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    exact = stack(x.clone(), positions, _Mixing())
    device = _Device(monkeypatch)
    got = stack(x.clone(), positions, _Mixing())
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-4)
    gate_up = "norm_gate_up" if activation == "silu" else "norm_linear"
    assert device.calls == 2 * ["norm_linear", "add_linear", gate_up, "add_linear"]

    # A layer with a product of its own keeps it, and what it found is added within the next norm or at the end.
    for layer in stack.layers:
        for owner in (layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            owner.product = lambda x, bias, weight=owner.weight: F.linear(x, weight, bias)
    device.calls.clear()
    torch.testing.assert_close(stack(x.clone(), positions, _Mixing()), exact, rtol=1e-4, atol=1e-4)
    assert device.calls == ["norm_linear"]  # the second layer's first norm has something to add


@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_products_are_added_up_by_the_next_norm_or_at_the_end(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = random_(DecoderStack(DecoderConfig(16, 8, 2, 2, 1, 4, 12, 32, o_bias=bias, mlp_bias=bias)))
    x, positions = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.arange(3)
    exact = stack(x.clone(), positions, _Mixing())
    x3, norm = torch.stack((x, x + 1)), RMSNorm(8)
    torch.testing.assert_close(norm(x3.clone(), x3), norm(x3 * 2))  # of that shape, and no parts
    layer_norm = LayerNorm(8)
    torch.testing.assert_close(layer_norm(x.clone(), torch.stack((x, x))), layer_norm(x * 3))
    calls: list[torch.Size] = []

    def divided_linear(x: Tensor, weight: Tensor) -> Tensor:
        calls.append(weight.shape)
        return torch.stack([F.linear(part, w) for part, w in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)])

    monkeypatch.setattr(ops, "divided_linear", divided_linear)
    torch.testing.assert_close(stack(x.clone(), positions, _Mixing()), exact, rtol=1e-4, atol=1e-4)
    assert calls == ([] if bias else 2 * [(8, 8), (8, 12)])  # a bias has no place among parts


def test_an_encoder_counts_positions_from_each_rows_start_and_asks_the_host_nothing() -> None:
    class Unknown(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("lengths were read")

    class Attention:
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[1] // k.shape[1]
            return v.repeat_interleave(groups, 1) + q * k.repeat_interleave(
                groups, 1
            )  # positions count, items do not mix

    stack = random_(EncoderStack(DecoderConfig(16, 8, 1, 2, 1, 4, 8, 32)))

    def encode(x: Tensor, offsets: list[int]) -> Tensor:
        rows = len(offsets) - 1
        step = Step(Unknown([0] * rows), torch.tensor(offsets), torch.zeros(rows), [True] * rows, {}, x.device, x.dtype)
        return stack.encode(step, x.clone(), Attention())  # type: ignore[no-any-return]

    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    whole = encode(x, [0, 3, 3, 7])
    torch.testing.assert_close(whole, torch.cat((encode(x[:3], [0, 3]), encode(x[3:], [0, 4]))))
