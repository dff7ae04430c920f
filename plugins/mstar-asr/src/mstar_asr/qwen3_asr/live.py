"""The text of speech that goes on: what the model is shown again of what it wrote.

Source: ``streaming_transcribe`` of QwenLM/Qwen3-ASR 7c6daf7. Every two seconds the model hears all speech so far. In
the first two rounds it writes from the beginning; from then on its answer begins with what it wrote before, less the
last 5 tokens, and less as many more as leave no half character at the end. Two things are done differently. The
beginning never gets shorter than it was: the reference takes 5 tokens back also when the model had nothing to add,
round after round; here what an answer has begun with once is final, and that is what clients are told. And the last
round is like all others: the reference lets a half character stand there.

The API side and the worker both follow an answer, each by itself: the same tokens give the same beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence

from mstar.processing.tokenizer import TextTokenizer

__all__ = ["Rounds"]

OPEN_ROUNDS = 2
"""Rounds whose answers are not held on to (``unfixed_chunk_num``)."""

OPEN_TOKENS = 5
"""Tokens at the end of an answer that are not held on to (``unfixed_token_num``)."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Rounds:
    """Follows the rounds of one live clip.

    :ivar begins: what the next answer begins with; each begins with the one before. :ivar answer: the last round's
        whole answer.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._rounds = 0
        self.begins = self.answer = ""

    def heard(self, tokens: Sequence[int]) -> None:
        """A round is over in which the model wrote *tokens*, without one that ends an answer."""
        self._rounds += 1
        self.answer = self.begins + self._tokenizer.decode(tokens)
        if self._rounds >= OPEN_ROUNDS:
            self.begins = self._begins()

    @property
    def begin_ids(self) -> list[int]:
        """:attr:`begins` as the model reads it."""
        return self._tokenizer.encode(self.begins, special=False)

    def _begins(self) -> str:
        ids = self._tokenizer.encode(self.answer, special=False)
        for end in range(len(ids) - OPEN_TOKENS, 0, -1):
            text = self._tokenizer.decode(ids[:end])
            if _REPLACEMENT not in text:
                # a tokenizer may write what it read in another form
                return text if text.startswith(self.begins) else self.begins
        return self.begins
