"""Whisper's special tokens: which ids they have in one checkpoint. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.spec.errors import WeightsError

__all__ = ["TIME_STEP", "WhisperTokens"]

TIME_STEP = 0.02
"""Seconds between two timestamp tokens."""


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of special tokens, by OpenAI's names.

    Text tokens are those below :attr:`eot`, timestamp tokens those from :attr:`timestamp_begin` on.

    :param languages: code → id; empty for English-only models, which have neither language nor task tokens.
    :param suppressed: ids that are never sampled. :param suppressed_first: those that no answer begins with.
    :param alignment_heads: (layer, head) of the decoder's cross-attention that follow the audio in time; empty where
        the checkpoint does not say.
    """

    eot: int
    sot: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    translate: int | None
    transcribe: int | None
    languages: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    alignment_heads: tuple[tuple[int, int], ...]

    @property
    def multilingual(self) -> bool:
        return bool(self.languages)

    def language_of(self, token: int) -> str:
        """The code of a language token."""
        return next(code for code, known in self.languages.items() if known == token)

    @classmethod
    def read(cls, folder: Path) -> WhisperTokens:
        """Those of the checkpoint in *folder*, from ``generation_config.json``, ``tokenizer.json`` and ``config.json``.

        :raises WeightsError: a file is missing, or a token is in none of them.
        """
        return cls.of(_object(folder / "config.json"), _object(folder / "generation_config.json"), _pieces(folder))

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any], pieces: Mapping[str, int]) -> WhisperTokens:
        """From the files' contents. *pieces*: the tokenizer's added tokens.

        Checkpoints of before 2023 have a ``generation_config.json`` without languages and tasks, and tokenizers call
        the token for silence ``<|nocaptions|>`` or ``<|nospeech|>``; the order of the special tokens is always that of
        OpenAI's tokenizer.
        """

        def piece(*names: str) -> int:
            for name in names:
                if name in pieces:
                    return pieces[name]
            raise WeightsError(f"the tokenizer lacks the token {names[0]!r}")

        no_timestamps = generation.get("no_timestamps_token_id")
        no_timestamps = piece("<|notimestamps|>") if no_timestamps is None else int(no_timestamps)
        languages = {code.strip("<|>"): int(i) for code, i in (generation.get("lang_to_id") or {}).items()}
        if not languages and generation.get("is_multilingual", piece("<|startoftranscript|>") == 50258):
            languages = {name[2:-2]: i for name, i in pieces.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", name)}
        tasks = generation.get("task_to_id") or {}
        first = generation.get("begin_suppress_tokens", config.get("begin_suppress_tokens")) or ()
        return cls(
            eot=piece("<|endoftext|>"),
            sot=int(config.get("decoder_start_token_id") or piece("<|startoftranscript|>")),
            sot_prev=int(generation.get("prev_sot_token_id") or piece("<|startofprev|>")),
            no_speech=piece("<|nospeech|>", "<|nocaptions|>"),
            no_timestamps=no_timestamps,
            timestamp_begin=no_timestamps + 1,
            translate=int(tasks.get("translate") or piece("<|translate|>")) if languages else None,
            transcribe=int(tasks.get("transcribe") or piece("<|transcribe|>")) if languages else None,
            languages=languages,
            suppressed=_ids(generation.get("suppress_tokens", config.get("suppress_tokens"))),
            suppressed_first=_ids(first),
            alignment_heads=tuple((int(a), int(b)) for a, b in generation.get("alignment_heads") or ()),
        )


def _ids(values: Sequence[Any] | None) -> tuple[int, ...]:
    return tuple(int(value) for value in values or ())


def _object(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise WeightsError(f"{file.parent} has no {file.name}") from None
    return found


def _pieces(folder: Path) -> dict[str, int]:
    """Added token → id."""
    return {token["content"]: int(token["id"]) for token in _object(folder / "tokenizer.json")["added_tokens"]}
