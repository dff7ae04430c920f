"""The bytes that a single token stands for: what OpenAI's ``logprobs[].bytes`` and ``token`` need.

A token may be part of a character, so its text alone says nothing; the vocabulary's spelling does. Two spellings are in
use: byte-level BPE writes each byte as one printable character (GPT-2), sentencepiece writes text with U+2581 for the
space and ``<0xNN>`` for a byte that has no piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

__all__ = ["token_speller"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_speller(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """A function id → bytes. Special tokens are spelt as they are; an id without a token (padding of the embedding) is
    empty."""
    content = json.loads(tokenizer.to_str())
    added = {token["id"] for token in content.get("added_tokens", ())}
    byte_level = "ByteLevel" in _types(content.get("decoder"))
    byte_of = _byte_level_alphabet()

    def spell(token: int) -> bytes:
        piece = tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in added:
            return str(piece).encode()
        if byte_level:
            return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in piece)
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace("\u2581", " ").encode()

    return spell


def _types(part: Any) -> set[str]:
    """The types of a decoder and of those that it is a sequence of."""
    if not isinstance(part, dict):
        return set()
    return {part.get("type", "")}.union(*(_types(inner) for inner in part.get("decoders", ())))


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte, as in GPT-2's ``bytes_to_unicode``: printable bytes stand for themselves, the others, in order,
    for the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
