"""Answers become transcripts as in the reference, and no word is told too early."""

from __future__ import annotations

import random

import pytest
from transformers.models.qwen3_asr.processing_qwen3_asr import _detect_and_fix_repetitions

from mstar_asr.qwen3_asr.transcript import Collapsed, TranscriptReader, collapse


def read(answer: str, forced: bool = False, pieces: int = 1) -> tuple[str, str | None]:
    reader = TranscriptReader(forced)
    size = max(1, len(answer) // pieces)
    told = "".join(reader.feed(answer[at : at + size]) for at in range(0, len(answer), size))
    return told + reader.finish(), reader.language


@pytest.mark.parametrize(
    ("answer", "text", "language"),
    [
        ("language English<asr_text>Hello, world.", "Hello, world.", "en"),
        ("  language Cantonese<asr_text> 你好 \n", "你好", "yue"),
        ("language None<asr_text>", "", None),
        ("language None<asr_text> mumble", "mumble", None),
        ("\nlanguage german\nx<asr_text>Ja.", "Ja.", "de"),
        ("language Klingon<asr_text>nuqneH", "nuqneH", None),
        ("no tag at all ", "no tag at all", None),
        ("language English<asr_text>a <asr_text> b", "a <asr_text> b", "en"),
        ("", "", None),
    ],
)
def test_an_answer_is_language_and_text(answer: str, text: str, language: str | None) -> None:
    for pieces in (1, 3, 1000):
        assert read(answer, pieces=pieces) == (text, language)


def test_where_the_language_is_forced_all_is_text() -> None:
    assert read(" language English<asr_text>Hello", forced=True) == ("language English<asr_text>Hello", None)


@pytest.mark.parametrize(
    ("text", "collapsed"),
    [
        ("a" + "b" * 20 + "c", "a" + "b" * 20 + "c"),
        ("a" + "b" * 21 + "c", "abc"),
        ("b" * 20 + "0123456789abcdefghij", "b0123456789abcdefghij"),  # 20 of one, and 20 more behind them
        ("b" * 20 + "0123456789abcdefghi", "b" * 20 + "0123456789abcdefghi"),
        ("no " * 19 + "yes", "no " * 19 + "yes"),
        ("no " * 25 + "yes", "no yes"),
        ("say no, " + "no, " * 30 + "and " + "go on " * 40, "say no, and go on "),
        (("x" * 30 + "y") * 20, "xy"),
        ("", ""),
    ],
)
def test_what_is_said_too_often_is_said_once(text: str, collapsed: str) -> None:
    assert collapse(text) == collapsed == _detect_and_fix_repetitions(text)


def noise(rng: random.Random) -> str:
    """Text with many repetitions of all lengths."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        pattern = "".join(rng.choices("ab c", k=rng.choice((1, 1, 2, 3, 7, 19, 20, 21))))
        parts.append(pattern * rng.choice((1, 1, 2, 5, 18, 19, 20, 21, 22, 41)))
        parts.append("".join(rng.choices("abcd ", k=rng.choice((0, 1, 5, 19, 20, 21, 39, 40)))))
    return "".join(parts)


def test_random_texts_collapse_as_in_the_reference() -> None:
    rng = random.Random(0)
    for _ in range(60):
        text = noise(rng)
        assert collapse(text) == _detect_and_fix_repetitions(text), text


def test_what_was_told_stays_whatever_follows() -> None:
    rng = random.Random(1)
    for _ in range(12):
        text, collapsed, told, at = noise(rng), Collapsed(), "", 0
        while at < len(text):
            size = rng.randint(1, 90)
            told += collapsed.feed(text[at : at + size])
            at += size
            for more in ("", text[at:], text[max(0, at - rng.randint(1, 20)) : at] * 25, noise(rng)):
                whole = _detect_and_fix_repetitions(text[:at] + more)
                assert whole.startswith(told), (text[:at], more)
        assert told + collapsed.finish() == _detect_and_fix_repetitions(text)


def test_plain_speech_is_told_nearly_at_once() -> None:
    reader, told = TranscriptReader(forced=True), ""
    text = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade of a tree."
    for at, char in enumerate(text, 1):
        told += reader.feed(char)
        assert len(told) >= at - 6
    assert told + reader.finish() == text
