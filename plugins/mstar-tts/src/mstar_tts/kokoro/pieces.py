"""Phonemes in pieces that are spoken one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["pieces"]

_BREAKS = ("!.?…", ":;", ",—", " ")
"""Where a sentence may be cut, best first."""


def pieces(sentences: Iterable[str], target: int, first: int, longest: int) -> list[str]:
    """*sentences* (phonemes of each) joined to pieces of about *target* phonemes, and of at most *longest*.

    A piece ends with a sentence, which may be longer than *target*. The first one ends after *first* phonemes where
    there is a break within them, so that sound starts early.
    """
    found: list[str] = []
    for sentence in filter(None, sentences):
        for part in _parts(sentence, longest, None if found else first):
            room = first if len(found) == 1 else target
            if found and len(found[-1]) + 1 + len(part) <= room:
                found[-1] += " " + part
            else:
                found.append(part)
    return found


def _parts(sentence: str, longest: int, first: int | None) -> Iterator[str]:
    if first is not None and len(sentence) > first:
        place = _break(sentence, first, _BREAKS[:-1])
        if place is not None and (head := sentence[:place].strip()):
            yield head
            sentence = sentence[place:].strip()
    while len(sentence) > longest:
        place = _break(sentence, longest, _BREAKS) or longest
        if part := sentence[:place].strip():
            yield part
        sentence = sentence[place:].strip()
    if sentence:
        yield sentence


def _break(sentence: str, within: int, kinds: tuple[str, ...]) -> int | None:
    """Behind the last break among the first *within* phonemes, of the best kind that there is in their second half, or
    else anywhere."""
    for least in (within // 2, 1):
        for kind in kinds:
            place = max(sentence.rfind(mark, least, within) for mark in kind)
            if place >= 0:
                return place + 1
    return None
