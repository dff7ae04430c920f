"""The tokenizer made from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_gguf as tiny
from transformers import AutoTokenizer

from mstar.spec.errors import WeightsError
from mstar_demo.tokenizer import build_tokenizer, write_tokenizer

FACTS: dict[str, Any] = {
    "llama.context_length": 128,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": tiny.TOKENS,
    "tokenizer.ggml.token_type": [3 if token in tiny.SPECIAL else 1 for token in tiny.TOKENS],
    "tokenizer.ggml.merges": tiny.MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": tiny.TEMPLATE,
}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        ("hello<|im_end|>", ["hello", "<|im_end|>"]),
        ("\n\n12", ["ĊĊ", "1", "2"]),  # GPT-2's pattern alone would leave the second newline to stand with the digits
        ("  1", ["ĠĠ", "1"]),
        ("  a", ["Ġ", "Ġa"]),
    ],
)
def test_pieces(text: str, tokens: list[str]) -> None:
    assert build_tokenizer(FACTS).encode(text).tokens == tokens


@pytest.mark.parametrize("text", ["hello  wörld\n\n1. 日本 🙂\t½٣", " leading", "trailing ", "<|im_start|>user\nhello"])
def test_text_survives(text: str) -> None:
    tokenizer = build_tokenizer(FACTS)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_files(tmp_path: Path) -> None:
    write_tokenizer(FACTS, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer("\n\n1").input_ids == build_tokenizer(FACTS).encode("\n\n1").ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "qwen2"}])
def test_other_tokenizers_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(WeightsError, match="cannot be converted"):
        build_tokenizer({**FACTS, **change})
