"""Long texts in pieces that can be spoken one by one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import sentencex

__all__ = ["sentence_pieces", "sentences"]

_CLAUSE = re.compile(r"[,;:](?=\s)|[\u2014\u2013\u3001\uff0c\uff1b\uff1a]")
"""Ends of clauses: a comma inside of a number has no space behind it; dashes and East Asian marks need none."""

_BLOCK = 4096
_SPACE = re.compile(r"\s+")
_JOINER = "\u200d"
_SKIN_TONES = range(0x1F3FB, 0x1F400)


def sentences(text: str, language: str | None = None) -> list[str]:
    """The sentences of *text*, without the blanks around them. Each has something to say: what is neither letter nor
    digit, an emoji or a lone quote, stays with the sentence before it (or, at the start, the one after it).

    :param language: its code (``en``, ``pt-BR``), for its abbreviations; unknown ones are cut as English is.
    """
    found: list[str] = []
    silent = ""  # what leads
    for unit in _segment(text, language):
        if _speakable(unit):
            found.append(silent + unit)
            silent = ""
        elif found:
            found[-1] += unit
        else:
            silent += unit
    return [stripped for unit in found or [silent] if (stripped := unit.strip())]


def sentence_pieces(text: str, longest: int, language: str | None = None, first: int | None = None) -> list[str]:
    """*text* in pieces of at most *longest* characters: as many whole sentences as fit.

    A sentence that is too long is cut after a clause, else between words, else between characters. Nothing but blanks
    is lost. A text without anything but blanks has no pieces.

    :param first: so many characters are enough for the first piece, which ends after a sentence or clause then, so that
        sound starts early. :raises ValueError: *longest* is less than 1.
    """
    if longest < 1:
        raise ValueError(f"pieces must have at least one character, not {longest}")
    found: list[str] = []
    for number, sentence in enumerate(sentences(text, language)):
        if number == 0 and first is not None and len(sentence) > first:
            head, sentence = _head(sentence, min(first, longest))
            if head:
                found.append(head)
        for part in _parts(sentence, longest):
            room = longest if len(found) != 1 or first is None else min(first, longest)
            if found and len(found[-1]) + 1 + len(part) <= room:
                found[-1] += _glue(found[-1], part) + part
            else:
                found.append(part)
    return found


def _segment(text: str, language: str | None) -> list[str]:
    """*text* cut after its sentences; nothing is left out.

    In blocks: what the library does with brackets and quotes that are never closed grows with the length's square."""
    code = re.split("[-_]", language or "en")[0].lower()
    found: list[str] = []
    at = 0
    while at < len(text):
        units = list(sentencex.segment(code, text[at : at + _BLOCK]))
        if at + _BLOCK < len(text) and len(units) > 1:
            units.pop()  # perhaps the block's end cut it
        found += units
        at += sum(map(len, units))
    return found


def _speakable(text: str) -> bool:
    return any(c.isalnum() for c in text)


def _head(sentence: str, first: int) -> tuple[str, str]:
    """The clauses of *sentence* within its *first* characters, and the rest; no head if there is no clause to cut
    after, for a cut that can be heard costs more than a late start."""
    ends = [match.end() for match in _CLAUSE.finditer(sentence, 0, first + 1) if match.end() <= first]
    for end in reversed(ends):
        head, rest = sentence[:end].strip(), sentence[end:].strip()
        if _speakable(head) and _speakable(rest):
            return head, rest
    return "", sentence


def _parts(sentence: str, longest: int) -> Iterator[str]:
    while len(sentence) > longest:
        end = _place(sentence, longest)
        if part := sentence[:end].strip():
            yield part
        sentence = sentence[end:].lstrip()
    if sentence:
        yield sentence


def _place(sentence: str, longest: int) -> int:
    """Where to cut *sentence*, which is longer than *longest*."""
    clauses = [m.end() for m in _CLAUSE.finditer(sentence, longest // 2, longest + 1) if m.end() <= longest]
    if clauses:
        return clauses[-1]
    spaces = [m.start() for m in _SPACE.finditer(sentence, 1, longest + 1)]
    if spaces:
        return spaces[-1]
    end = longest
    while end > 1 and _joined(sentence[end - 1], sentence[end]):
        end -= 1
    return end if end > 1 else longest


def _joined(left: str, right: str) -> bool:
    """Both belong to one character as a reader sees it."""
    marks = unicodedata.category(right).startswith("M") or ord(right) in _SKIN_TONES
    return marks or _JOINER in (left, right)


def _glue(left: str, right: str) -> str:
    """What stands between two sentences of a piece: East Asian ones follow without a space."""
    return "" if _wide(left[-1]) and _wide(right[0]) else " "


def _wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"
