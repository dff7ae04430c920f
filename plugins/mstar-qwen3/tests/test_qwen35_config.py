"""What a ``config.json`` says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mstar.spec.errors import SetupError
from mstar_qwen3.config import Qwen35Config
from mstar_qwen3.tiny import write, write_text

TEXT: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
WHOLE: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "vision_config": {"depth": 24},
    "tie_word_embeddings": True,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def test_the_published_4b() -> None:
    found = Qwen35Config.from_hf(WHOLE)
    text = found.text
    assert (text.layers, len(text.full_layers), len(text.linear_layers)) == (32, 8, 24)
    assert text.full_layers[:2] == (3, 7)
    assert (text.channels, text.rotary_dims, text.sections) == (8192, 64, (11, 11, 10))
    assert (text.tied, text.state_dtype, text.rope.theta) == (True, "float32", 1e7)
    assert (found.image_token, found.video_token, found.vision_start, found.vision_end) == (
        248056,
        248057,
        248053,
        248054,
    )
    assert found.vision == {"depth": 24}


def test_both_layouts(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write_text(tmp_path / "text")
    whole, text = (
        Qwen35Config.from_hf(json.loads((tmp_path / name / "config.json").read_text())) for name in ("whole", "text")
    )
    assert (whole.text_layout, text.text_layout) == (False, True)
    assert (whole.text.tied, text.text.tied) == (True, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_5_moe"}, "model_type 'qwen3_5_moe' is not supported"),
        ({"text_config": None}, "text_config is missing"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"image_token_id": None}, "image_token_id is missing"),
    ],
)
def test_a_checkpoint_that_is_none(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Qwen35Config.from_hf({**WHOLE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number of at least 1"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"linear_num_key_heads": 12}, "linear_num_value_heads 32 is no multiple of its 12 key heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
        ({"layer_types": ["full_atention"] * 32}, "did you mean 'full_attention'"),
        ({"full_attention_interval": 64}, "layers of both kinds"),
        ({"mamba_ssm_dtype": "float64"}, "mamba_ssm_dtype 'float64' is not supported"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"rope_parameters": {"mrope_section": [11, 11, 11]}}, "must sum to half of the 64 elements"),
        ({"rope_parameters": {"mrope_section": [32]}}, "three whole numbers"),
        ({"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved is false"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported"),
    ],
)
def test_sizes_that_are_not_computed_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        Qwen35Config.from_hf({**WHOLE, "text_config": {**TEXT, **change}})
