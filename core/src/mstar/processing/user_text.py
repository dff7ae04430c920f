"""What clients write is text, also where it spells a special token: ``<|im_start|>`` in a message begins no turn.

A chat template mixes its own special tokens with what clients wrote, and a tokenizer cannot tell them apart any more.
So the places where a client's string spells a special token are replaced by marks before the template is rendered.
Which tokens of the rendered text are special is then found with the marks in place, and the text between them, with
what stood there put back, is read by a tokenizer that knows no special tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

__all__ = ["UserText"]


class UserText:
    """The special tokens of one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        # A token that is looked for in normalised text can be spelled in other ways than its own.
        self._varied = any(token.normalized for token in added.values() if token.special)
        self._spelled = tuple(token.content for token in added.values() if token.special and token.content)

    def mark(self, value: Any, trusted: Collection[str] = ()) -> tuple[Any, dict[str, str]]:
        """*value* (plain data) with a mark for each special token in its strings, and what each mark stands for.

        :param trusted: tokens that stay special.

        Without such tokens, which is nearly always, there are no marks, and *value* is returned as it is.
        """
        if not self._occurs(value):
            return value, {}
        marks: dict[str, str] = {}
        return self._marked(value, secrets.token_hex(8), marks, trusted), marks

    def _occurs(self, value: Any) -> bool:
        if isinstance(value, str):
            return bool(self._spans(value))
        if isinstance(value, Mapping):
            return any(self._occurs(part) for pair in value.items() for part in pair)
        return isinstance(value, Sequence) and any(self._occurs(part) for part in value)

    def _marked(self, value: Any, nonce: str, marks: dict[str, str], trusted: Collection[str]) -> Any:
        def again(part: Any) -> Any:
            return self._marked(part, nonce, marks, trusted)

        if isinstance(value, str):
            pieces, end = [], 0
            for begin, stop in self._spans(value):
                if value[begin:stop] in trusted:
                    continue
                mark = f"\ue000{nonce}{len(marks):x}\ue001"  # ends, so that none is the beginning of another
                marks[mark] = value[begin:stop]
                pieces += [value[end:begin], mark]
                end = stop
            return "".join([*pieces, value[end:]])
        if isinstance(value, Mapping):
            return {again(k): again(v) for k, v in value.items()}
        if isinstance(value, Sequence):
            return [again(part) for part in value]
        return value

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where the tokenizer finds special tokens in *text*, as (begin, end) in characters."""
        if not self._varied and not any(token in text for token in self._spelled):
            return []
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [span for number, span in zip(found.ids, found.offsets, strict=True) if number in self._special]

    def encode(self, text: str, marks: Mapping[str, str]) -> list[int]:
        """The ids of rendered *text*: special where it is so with its *marks*, plain in between."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        end = 0
        for number, (begin, stop) in zip(found.ids, found.offsets, strict=True):
            if number in self._special:
                ids += self._plain_ids(text[end:begin], marks)
                ids.append(number)
                end = stop
        return ids + self._plain_ids(text[end:], marks)

    def _plain_ids(self, text: str, marks: Mapping[str, str]) -> list[int]:
        for mark, original in marks.items():
            text = text.replace(mark, original)
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    @cached_property
    def _plain(self) -> Tokenizer:
        plain: Tokenizer = copy.deepcopy(self._tokenizer)
        plain.encode_special_tokens = True
        return plain
