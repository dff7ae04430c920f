"""Reading config.json: both generations of transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mstar.nn.config import DecoderConfig, read_config
from mstar.spec.errors import SetupError, WeightsError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 32}


def test_a_version_4_config() -> None:
    config = DecoderConfig.from_hf(LLAMA)
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.intermediate, config.layers, config.vocab, config.max_positions) == (1536, 4, 49152, 8192)
    assert (config.rope.kind, config.rope.theta, config.norm_eps, config.tied) == ("default", 100000.0, 1e-5, True)
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.windows))


def test_rope_parameters_of_version_5_and_scaling_of_version_4_agree() -> None:
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000}
    old = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert DecoderConfig.from_hf(new).rope == DecoderConfig.from_hf(old).rope


def test_biases_belong_to_the_family() -> None:
    qwen = DecoderConfig.from_hf(QWEN)
    assert (qwen.qkv_bias, qwen.o_bias) == (True, False)
    llama = DecoderConfig.from_hf(LLAMA | {"attention_bias": True})
    assert (llama.qkv_bias, llama.o_bias) == (True, True)


def test_windows() -> None:
    assert DecoderConfig.from_hf(QWEN).windows == ()
    on = QWEN | {"use_sliding_window": True, "max_window_layers": 3}
    assert DecoderConfig.from_hf(on).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert DecoderConfig.from_hf(on | {"layer_types": kinds}).windows == (32, None, 32, None)
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 16}
    assert DecoderConfig.from_hf(mistral).windows == (16,) * 4
    assert DecoderConfig.from_hf(mistral | {"sliding_window": None}).windows == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen4"}, "model_type 'qwen4' is not supported; did you mean 'qwen"),
        ({"hidden_act": "sil"}, "hidden_act 'sil' is not supported; did you mean 'silu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is no multiple of num_key_value_heads 2"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"hidden_size": "x"}, "hidden_size is 'x'; it must be a whole number of at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "layer_types": ["chunked"] * 4},
            "layer_types has 'chunked'",
        ),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError) as caught:
        DecoderConfig.from_hf(LLAMA | change)
    assert says in str(caught.value)


def test_config_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="needs weights"):
        read_config(None)
    with pytest.raises(WeightsError, match="does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="holds list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == LLAMA
