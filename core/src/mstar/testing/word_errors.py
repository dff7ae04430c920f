"""How well speech was understood: word errors, as tests and benchmarks of speech count them."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["word_errors", "words"]


def words(text: str) -> list[str]:
    """The words of English *text* in lower case, without punctuation and digits."""
    return re.findall(r"[a-z']+", text.lower())


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Fewest words to change, leave out or put in that make *heard* of *said* (Levenshtein's distance); over the
    number of words said it is the word error rate."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]
