"""Single blocks against transformers' or plain float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from mstar.nn.config import ACTIVATIONS
from mstar.nn.decoder import GatedMLP
from mstar.nn.linear import QKVLinear
from mstar.nn.norm import RMSNorm


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


def test_grouped_heads_are_laid_out_query_first() -> None:
    layer = QKVLinear(8, heads=4, kv_heads=2, head_dim=3)
    assert layer.parts == {"q_proj": 12, "k_proj": 6, "v_proj": 6}
    assert layer.weight.shape == (24, 8)
