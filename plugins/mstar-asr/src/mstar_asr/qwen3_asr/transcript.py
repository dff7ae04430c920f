"""From what the model writes to a transcript: repetitions collapsed, language and words told apart.

The model writes ``language English<asr_text>`` and the words; where the prompt names the language, the words only. What
this module makes of a whole answer is what the reference makes of it (QwenLM/Qwen3-ASR 7c6daf7, ``parse_asr_output`` in
``qwen_asr/inference/utils.py``). It gives every character as soon as nothing that may follow can change it, so that
what was told need not be taken back.
"""

from __future__ import annotations

from mstar.processing.speech.languages import find_language

__all__ = ["ASR_TEXT", "Collapsed", "TranscriptReader", "collapse"]

ASR_TEXT = "<asr_text>"
"""Ends what the model says about the language. An ordinary token: decoding keeps it."""

REPEATS = 20
"""So many repetitions are not speech."""

LONGEST = 20
"""Characters of the longest pattern whose repetitions are looked for."""


class _Patterns:
    """Collapses patterns of up to 20 characters that stand 20 times or more in a row, the earliest and shortest first.

    :ivar out: what is settled. A character that equals the one a pattern's length before it may begin a repetition
        that is dropped in the end: it is settled only when something else has come.
    """

    def __init__(self) -> None:
        self.out: list[str] = []
        self._pattern = ""  # is being repeated: nothing counts before something else comes
        self._bite = ""
        self._begin()

    def _begin(self) -> None:
        self._text: list[str] = []  # behind the last pattern that was collapsed
        self._told = 0
        self._since = [0] * (LONGEST + 1)  # of each period: how many characters at the end follow it
        self._run: int | None = None  # where 20 times one character begin that may be too many

    def add(self, char: str) -> None:
        if self._pattern:
            self._swallow(char)
            return
        text, end = self._text, len(self._text)
        text.append(char)
        for period in range(1, min(LONGEST, end) + 1):
            self._since[period] = self._since[period] + 1 if text[end - period] == char else 0
            if self._since[period] == (REPEATS - 1) * period:
                if period > 1:
                    start = len(text) - REPEATS * period
                    self._pattern = "".join(text[start : start + period])
                    self._keep(start + period)
                    return
                self._run = end - REPEATS + 1 if self._run is None else self._run
        # the reference looks for no repetition in the last 40 characters
        if self._run is not None and len(text) == self._run + 2 * REPEATS:
            rest = text[self._run + REPEATS :]
            self._keep(self._run + 1)
            for one in rest:
                self.add(one)

    def _swallow(self, char: str) -> None:
        self._bite += char
        if self._bite == self._pattern:
            self._bite = ""
        elif not self._pattern.startswith(self._bite):
            self._stop_swallowing()

    def _stop_swallowing(self) -> None:
        bite, self._bite, self._pattern = self._bite, "", ""
        for one in bite:
            self.add(one)

    def _keep(self, end: int) -> None:
        """Everything up to *end* stays; what follows is looked at by itself."""
        self.out += self._text[self._told : end]
        self._begin()

    def settle(self) -> None:
        end = len(self._text) - max(self._since)
        if self._run is not None:
            end = min(end, self._run + 1)
        self.out += self._text[self._told : end]
        self._told = max(self._told, end)

    def finish(self) -> None:
        self._stop_swallowing()
        self.out += self._text[self._told :]
        self._told = len(self._text)


class Collapsed:
    """A text in which more than 20 times one character is one, and then a pattern of up to 20 characters that stands 20
    times or more in a row is one pattern.

    The pieces that :meth:`feed` returns, with that of :meth:`finish`, are the reference's result for the whole text.
    """

    def __init__(self) -> None:
        self._patterns = _Patterns()
        self._last, self._count = "", 0

    def feed(self, text: str) -> str:
        """More of the text. Returns what is certain by now and has not been returned."""
        for char in text:
            if char == self._last:
                self._count += 1
                continue
            self._end_run()
            self._last, self._count = char, 1
            self._patterns.add(char)
        self._patterns.settle()
        return self._taken()

    def finish(self) -> str:
        """The rest: there is no more."""
        self._end_run()
        self._last, self._count = "", 0
        self._patterns.finish()
        return self._taken()

    def _end_run(self) -> None:
        if self._count <= REPEATS:
            for _ in range(self._count - 1):
                self._patterns.add(self._last)

    def _taken(self) -> str:
        out, self._patterns.out = self._patterns.out, []
        return "".join(out)


def collapse(text: str) -> str:
    """:class:`Collapsed` of a whole text."""
    collapsed = Collapsed()
    return collapsed.feed(text) + collapsed.finish()


class _Stripped:
    """A text without the white space around it."""

    def __init__(self) -> None:
        self._begun, self._space = False, ""

    def feed(self, text: str) -> str:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._begun = self._begun or bool(kept)
        return kept


class TranscriptReader:
    """Reads one answer. What :meth:`feed` and :meth:`finish` return, joined, is the transcript.

    An answer without ``<asr_text>`` is all text, which is known at its end.

    :param forced: the prompt has named the language: the answer is text only.
    :ivar language: code of the language that the answer names, once it is known; ``None`` for silence.
    """

    def __init__(self, forced: bool):
        self.language: str | None = None
        self._raw, self._collapsed, self._text = _Stripped(), Collapsed(), _Stripped()
        self._head: str | None = None if forced else ""

    @property
    def in_text(self) -> bool:
        """Whether what the model writes next is said, and not about it."""
        return self._head is None

    def feed(self, text: str) -> str:
        """More of the answer. Returns more of the transcript: what nothing can change any more."""
        return self._read(self._collapsed.feed(self._raw.feed(text)))

    def finish(self) -> str:
        """The rest of the transcript."""
        text = self._read(self._collapsed.finish())
        if self._head is not None:
            text, self._head = self._text.feed(self._head), None
        return text

    def _read(self, text: str) -> str:
        if self._head is None:
            return self._text.feed(text)
        head, tag, rest = (self._head + text).partition(ASR_TEXT)
        if not tag:
            self._head = head
            return ""
        self._head, self.language = None, _language(head)
        return self._text.feed(rest)


def _language(head: str) -> str | None:
    """The code of the language in ``language English``. Silence is ``language None``."""
    if "language none" in head.lower():
        return None
    for line in head.splitlines():
        word, _, name = line.strip().partition(" ")
        if word.lower() == "language":
            found = find_language(name)
            return None if found is None else found.code
    return None
