"""Orpheus' vocabulary: Llama's, and behind it ``<custom_token_0>``, ``<custom_token_1>``… No torch.

Reference: canopyai/Orpheus-TTS, ``orpheus_tts_pypi/orpheus_tts/engine_class.py`` and ``decoder.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FRAME", "LEVELS", "OrpheusTokens"]

FRAME = 7
"""Codes of a frame, and tokens."""

LEVELS = ((0,), (1, 4), (2, 3, 5, 6))
"""Places in a frame that hold the codes of each of SNAC's codebooks, in order of time."""

_FIRST_CUSTOM = 128_256
_FIRST_CODE = 10
"""Custom tokens before the codes."""


@dataclass(frozen=True)
class OrpheusTokens:
    """:param custom: id of ``<custom_token_0>``. :param codes: entries of a codebook."""

    custom: int = _FIRST_CUSTOM
    codes: int = 4096

    @classmethod
    def read(cls, config: Mapping[str, Any], codes: int) -> OrpheusTokens:
        """*config*: the language model's. The published ones all have the same vocabulary; a tiny one for tests says
        ``first_custom_token``."""
        return cls(int(config.get("first_custom_token", _FIRST_CUSTOM)), codes)

    @property
    def start_of_human(self) -> int:
        return self.custom + 3

    @property
    def end_of_speech(self) -> int:
        return self.custom + 2

    @property
    def before_speech(self) -> tuple[int, ...]:
        """Behind the text and its end: end of human, start of ai, start of speech."""
        return self.custom + 4, self.custom + 5, self.custom + 1

    @property
    def first_code(self) -> int:
        return self.custom + _FIRST_CODE

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Ids of the codes at each place of a frame: (first, one behind the last)."""
        starts = [self.first_code + place * self.codes for place in range(FRAME)]
        return tuple((start, start + self.codes) for start in starts)

    @property
    def end(self) -> int:
        """One behind the last code: the vocabulary has at least so many."""
        return self.first_code + FRAME * self.codes
