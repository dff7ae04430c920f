"""A plugin with tiny models of every decoder kind that the causal-LM pattern serves, for tests over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mstar.hookspecs import hookimpl
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec
from mstar.testing.tiny_tokenizers import EOS, TEMPLATE, byte_level, id_of

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = {
    "tiny-llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "tiny-llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "tiny-qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "tiny-qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
    "tiny-mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
}


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            key=key,
            family="tiny",
            summary="a random decoder for tests",
            weights=(),
            licence=Licence("Apache-2.0"),
            model="mstar.patterns.causal_lm:CausalLM",
            processor="mstar.processing.chat:TextProcessor",
            knobs=SamplingKnobs,
            abilities=("chat", "completion", "generate"),
            deployment={"dtype": "float32", "device": "cpu", "engine": {"threads": 1}},
        )
        for key in KINDS
    ]


def publish(key: str, folder: Path, shard: str = "5GB") -> PreTrainedModel:
    """A random checkpoint with tokenizer and chat template, as the Hub would have it. Returns the reference model."""
    kind, config_class, extra = KINDS[key]
    tokenizer = byte_level()
    eos = id_of(tokenizer, EOS)
    config = config_class(
        **SIZES, **extra, vocab_size=tokenizer.get_vocab_size(), eos_token_id=eos, bos_token_id=eos, pad_token_id=eos
    )
    torch.manual_seed(7)
    model: PreTrainedModel = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, or a swapped one would not show
            parameter.normal_(0.8 if parameter.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return model
