"""Rotary positions against transformers' own frequencies and rotation, for every scaling that is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mstar.nn.config import DecoderConfig
from mstar.nn.rotary import Rotary

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotation_equals_transformers(name: str, head_dim: int) -> None:
    reference = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **ROPES[name]},
    )
    positions = torch.tensor([0, 1, 7, 511, 512, 2047])
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(len(positions), heads, head_dim, generator=generator) for heads in (4, 2))
    cos, sin = LlamaRotaryEmbedding(reference)(q, positions[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)

    config = DecoderConfig.from_hf(reference.to_dict())
    rotation = Rotary(head_dim, config.rope)(positions, torch.float32)
    for ours, theirs in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotation.apply(ours), theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_angles_are_float32_whatever_the_models_dtype() -> None:
    rotary = Rotary(16, DecoderConfig(1, 16, 1, 1, 1, 16, 1, 1).rope)
    far = torch.tensor([100_003])
    exact, rounded = rotary(far, torch.float32), rotary(far, torch.bfloat16)
    assert torch.equal(exact.cos.bfloat16(), rounded.cos)
    assert torch.equal(exact.sin.bfloat16(), rounded.sin)
