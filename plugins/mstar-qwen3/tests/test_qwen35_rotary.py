"""Positions over three axes against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from mstar_qwen3.config import TextConfig
from mstar_qwen3.rotary import PartialRotary, head_order

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("changed", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize(("head_dim", "factor", "sections"), [(32, 0.5, [4, 2, 2]), (256, 0.25, [11, 11, 10])])
def test_heads_turn_as_in_transformers(
    changed: dict[str, Any], head_dim: int, factor: float, sections: list[int]
) -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": factor,
        "mrope_section": sections,
        "mrope_interleaved": True,
        **changed,
    }
    theirs = Qwen3_5TextConfig(
        hidden_size=64, num_hidden_layers=4, head_dim=head_dim, rope_parameters=rope, max_position_embeddings=4096
    )
    ours = TextConfig.from_hf(theirs.to_dict(), tied=False)
    draw = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 4000, (3, 9), generator=draw)
    heads = torch.randn(9, 5, head_dim, generator=draw)
    cos, sin = Qwen3_5TextRotaryEmbedding(theirs)(heads, positions[:, None])
    want, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    order = head_order(head_dim, int(head_dim * factor))
    got = PartialRotary(ours)(positions, torch.float32).apply(heads[..., order].clone())
    torch.testing.assert_close(got, want[0][..., order], rtol=1e-5, atol=1e-5)
    assert sorted(order.tolist()) == list(range(head_dim))
