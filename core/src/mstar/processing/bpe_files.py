"""A tokenizer from the files of before ``tokenizer.json``: ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mstar.spec.errors import SetupError

__all__ = ["QWEN2_PATTERN", "read_bpe"]

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2's tokenizer cuts a text (``PRETOKENIZE_REGEX`` in transformers)."""


def read_bpe(folder: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The byte-level BPE tokenizer in *folder*; ``None`` where there are no such files, or where how it cuts a text is
    not known.

    :param config: ``tokenizer_config.json``, which names its class and has the tokens that were added.
    """
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not vocab.is_file() or not merges.is_file():
        return None
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") != "Qwen2Tokenizer":
        return None
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises bare Exception for files that it cannot read
        raise SetupError(f"{vocab}, {merges}: {error}") from error
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = config.get("added_tokens_decoder", {})
    for number, token in sorted(((int(number), token) for number, token in added.items()), key=lambda pair: pair[0]):
        flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        special = bool(token.get("special", False))
        one = AddedToken(token["content"], special=special, **flags)
        if special:
            tokenizer.add_special_tokens([one])
        else:
            tokenizer.add_tokens([one])
        found = tokenizer.token_to_id(token["content"])
        if found != number:
            message = f"the token {token['content']!r} is to have id {number}, but behind {vocab.name} it gets {found}"
            raise SetupError(f"{folder / 'tokenizer_config.json'}: {message}")
    return tokenizer
