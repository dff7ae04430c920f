"""A Hugging Face tokenizer from a GGUF file's metadata.

transformers can read GGUF tokenizers, but (5.24) drops the digit splitting of SmolLM's pre-tokenizer: "\\n\\n1." would
be cut unlike the model's training data. Here the tokenizer is put together from its parts instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mstar.spec.errors import WeightsError

__all__ = ["build_tokenizer", "write_tokenizer"]

_CONTROL = 3
"""GGUF's token type of special tokens."""


def build_tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that GGUF metadata *facts* describe; no token is added to a text by itself.

    :raises WeightsError: for a tokenizer of another kind than SmolLM's.
    """
    kind = facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"a tokenizer of kind {kind[0]!r} with pre-tokenizer {kind[1]!r} cannot be converted")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm": every digit alone, then GPT-2's pattern on what lies between.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, token_type in kinds if token_type == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_tokenizer(facts: dict[str, Any], out: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` into folder *out*."""
    build_tokenizer(facts).save(str(out / "tokenizer.json"))
    tokens = facts["tokenizer.ggml.tokens"]
    config = {
        # the class that takes tokenizer.json as it is; the model-specific ones rebuild parts of it
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(facts["tokenizer.chat_template"])
