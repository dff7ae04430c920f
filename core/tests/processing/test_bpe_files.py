"""Tokenizers from ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mstar.processing.bpe_files import QWEN2_PATTERN
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.errors import SetupError
from mstar.testing.tiny_tokenizers import CORPUS

TEXTS = ("Hello there, how are you?", "  2024 was\n\n good. don't", "é é 世界 😀", "<|end|>x<mark> <|end|>", "")


def files(folder: Path, first: int | None = None, **changes: object) -> int:
    """Writes the older files; returns the size of the vocabulary without what is added to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.model.save(str(folder))
    size = int(tokenizer.get_vocab_size())
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    start = size if first is None else first
    added = {
        str(start + 1): {"content": "<mark>", "special": False, **flags},
        str(start): {"content": "<|end|>", "special": True, **flags},
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return size


def test_they_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    size = files(tmp_path)
    ours, theirs = TextTokenizer(tmp_path), Qwen2Tokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size >= size + 2
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_special_tokens_are_special(tmp_path: Path) -> None:
    size = files(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    assert (tokenizer.id_of("<|end|>"), tokenizer.id_of("<mark>")) == (size, size + 1)
    assert tokenizer.decode([size, size + 1]) == "<mark>"


def test_what_a_client_writes_is_text(tmp_path: Path) -> None:
    files(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    end = tokenizer.id_of("<|end|>")
    ids = tokenizer.encode_around("<|end|>a", "b<|end|>c", "d<|end|>")
    assert [at for at, number in enumerate(ids) if number == end] == [0, len(ids) - 1]
    assert tokenizer.decode(ids, skip_special=False) == "<|end|>ab<|end|>cd<|end|>"
    assert tokenizer.encode_around("a", "b", "c") == tokenizer.encode("abc")


def test_another_class_is_not_guessed(tmp_path: Path) -> None:
    files(tmp_path, tokenizer_class="BertTokenizer")
    with pytest.raises(SetupError, match="is missing"):
        TextTokenizer(tmp_path)


def test_a_folder_of_something_else_is_told_by_what_it_holds(tmp_path: Path) -> None:
    for name in ("model_index.json", "vae"):
        (tmp_path / name).touch()
    with pytest.raises(SetupError, match=r"holds no model of texts, but model_index\.json, vae$"):
        TextTokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SetupError, match="older layout"):
        TextTokenizer(tmp_path)


def test_ids_that_do_not_follow_are_a_fault(tmp_path: Path) -> None:
    files(tmp_path, first=9000)
    with pytest.raises(SetupError, match="is to have id 9000"):
        TextTokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(SetupError, match=r"vocab\.json"):
        TextTokenizer(tmp_path)
