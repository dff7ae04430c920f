"""Long texts in pieces: nothing is lost, nothing is too long, cuts are where a speaker breathes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.processing.sentences import sentence_pieces, sentences

SIGNS = "ab .?!\"'“”«»()[]\n\t,;:—。，「」？！🙂👩\u200d👧é\u0301\u200b1MrDU٣ش।"


def squeezed(pieces: list[str]) -> str:
    return "".join("".join(pieces).split())


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Mr. Smith left. He paid $3.50!", "en", ["Mr. Smith left.", "He paid $3.50!"]),
        (
            "See p. 5, e.g. the U.S. edition. Fine.",
            "en-US",
            ["See p. 5, e.g. the U.S. edition.", "Fine."],
        ),
        ('"Is it so?" she asked. 🙂 !!! Yes.', None, ['"Is it so?" she asked. 🙂 !!!', "Yes."]),
        ("Am 3. Oktober kam Dr. Müller. Er blieb.", "de", ["Am 3. Oktober kam Dr. Müller.", "Er blieb."]),
        ("今天天气很好。你去哪里？", "zh", ["今天天气很好。", "你去哪里？"]),
        ("「行くぞ。」そうですか？", "ja", ["「行くぞ。」", "そうですか？"]),
        ("यह एक है। यह दूसरा है।", "hi", ["यह एक है।", "यह दूसरा है।"]),
        ("One line\n\nAnother", "en", ["One line", "Another"]),
        ("🙂 Hello.", "en", ["🙂 Hello."]),
        ("🙂🙂 !!!", "en", ["🙂🙂 !!!"]),
        ("Plain", "no-such-language", ["Plain"]),
        (" \n ", "en", []),
    ],
)
def test_sentences(text: str, language: str | None, expected: list[str]) -> None:
    assert sentences(text, language) == expected


def test_as_many_sentences_as_fit_are_one_piece() -> None:
    text = "One two. Three four. Five six. Seven."
    assert sentence_pieces(text, 20) == ["One two. Three four.", "Five six. Seven."]
    assert sentence_pieces(text, 20, first=8) == ["One two.", "Three four.", "Five six. Seven."]
    assert sentence_pieces("今天好。你好。", 20, "zh") == ["今天好。你好。"]


def test_a_long_sentence_is_cut_after_a_clause_else_between_words() -> None:
    assert sentence_pieces("He paid 1,000 coins, and then he left the town", 24) == [
        "He paid 1,000 coins,",
        "and then he left the",
        "town",
    ]
    assert sentence_pieces("abcdefgh", 3) == ["abc", "def", "gh"]


def test_the_first_piece_ends_at_a_clause_or_not_at_all() -> None:
    text = "When it rained, nobody who could stay at home went out."
    assert sentence_pieces(text, 100, first=20) == ["When it rained,", "nobody who could stay at home went out."]
    assert sentence_pieces(text.replace(",", ""), 100, first=20) == [text.replace(",", "")]


def test_what_a_reader_sees_as_one_character_is_not_cut() -> None:
    assert sentence_pieces("e\u0301" * 4, 3) == ["e\u0301"] * 4
    assert sentence_pieces("👩\u200d👧" * 2, 4) == ["👩\u200d👧"] * 2


@given(
    text=st.text(st.sampled_from(SIGNS) | st.characters(codec="utf-8"), max_size=200),
    longest=st.integers(1, 40),
    first=st.none() | st.integers(1, 20),
    language=st.sampled_from([None, "en", "zh", "de-DE", "ar", "xx", ""]),
)
def test_nothing_is_lost_and_nothing_too_long(text: str, longest: int, first: int | None, language: str | None) -> None:
    found = sentence_pieces(text, longest, language, first)
    assert squeezed(found) == squeezed([text])
    assert all(0 < len(piece) <= longest and piece == piece.strip() for piece in found)
    spoken = sentences(text, language)
    assert squeezed(spoken) == squeezed([text])
    if any(c.isalnum() for c in text):
        assert all(any(c.isalnum() for c in sentence) for sentence in spoken)


def test_a_long_text_is_cut_in_time() -> None:
    """Brackets that are never closed: what a library does with them must not grow with the square of the length."""
    for text in ("(«" * 16_000, "“" * 32_000, "Hello there. " * 2_500):
        assert squeezed(sentence_pieces(text, 200, first=50)) == squeezed([text])
    assert set(sentences("Hello there. " * 2_500)) == {"Hello there."}


def test_no_piece_without_a_character() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sentence_pieces("a", 0)
