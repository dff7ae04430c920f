"""Word times: the path through the alignment against transformers', the rest case by case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from mstar_asr.whisper.words import TimedWord, dtw, merge_punctuation, split_words, token_times, word_times


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (7, 1), (5, 40), (40, 5), (60, 200)])
@pytest.mark.parametrize("digits", [8, 0], ids=["", "ties"])
def test_the_path_is_that_of_transformers(rows: int, columns: int, digits: int) -> None:
    cost = np.random.default_rng(rows * 7 + columns).normal(size=(rows, columns)).round(digits)
    for found, expected in zip(dtw(cost), _dynamic_time_warping(cost), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_tokens_begin_where_the_path_reaches_them() -> None:
    alignment = np.zeros((4, 1500), np.float32)
    for row, (start, end) in enumerate(((10, 25), (25, 60), (60, 100), (100, 150))):
        alignment[row, start:end] = 1.0
    alignment[:, 150:] = 9.0  # behind the clip's end
    assert token_times(alignment, 300) == pytest.approx([0.0, 0.5, 1.2, 2.0], abs=0.03)


VOCAB = [" a", " long", "er", " word", ",", ".", " (", ")", ' "', "!", "日", "本"]


def decode(ids: Sequence[int]) -> str:
    return "".join(VOCAB[i] for i in ids)


def ids(*pieces: str) -> list[int]:
    return [VOCAB.index(piece) for piece in pieces]


def test_words_are_what_spaces_and_marks_divide() -> None:
    tokens = ids(" a", " long", "er", " word", ",", " (", " a", ")", ".")
    found = [word for word, _ in split_words(tokens, decode, "en")]
    assert found == [" a", " longer", " word", ",", " (", " a", ")", "."]
    assert [word for word, _ in split_words(ids("日", "本", "日"), decode, "ja")] == ["日", "本", "日"]
    assert [word for word, _ in split_words(ids("日", "本", "日"), decode, "en")] == ["日本日"]


def test_a_character_in_several_tokens_is_one_piece() -> None:
    data = [b" \xe6", b"\x97", b"\xa5", b"\xe6\x9c\xac", b"\xff", b"x", b"\xe6"]

    def spell(tokens: Sequence[int]) -> str:
        return b"".join(data[i] for i in tokens).decode("utf-8", "replace")

    found = split_words(range(7), spell, "ja")
    # a byte that the model got wrong is a piece of its own; so is half a character at the end
    assert found == [(" 日", (0, 1, 2)), ("本", (3,)), ("\ufffd", (4,)), ("x", (5,)), ("\ufffd", (6,))]


def timed(*words: tuple[str, float, float]) -> list[TimedWord]:
    return [TimedWord(text, (number,), start, end) for number, (text, start, end) in enumerate(words)]


def test_marks_join_their_words() -> None:
    words = timed(
        (" (", 0, 0.1), (" a", 0.1, 0.2), (",", 0.2, 0.3), (' "', 0.3, 0.4), (" word", 0.4, 0.6), ("!", 0.6, 0.9)
    )  # fmt: skip
    found = merge_punctuation(words)
    assert [(w.text, w.tokens, w.start, w.end) for w in found] == [
        (" ( a,", (0, 1, 2), 0.1, 0.2),
        (' " word!', (3, 4, 5), 0.4, 0.6),
    ]


def times(
    *parts: tuple[float, float, list[int]], begins: Sequence[float], offset: float = 0.0, last: float = 0.0
) -> list[Any]:
    found = word_times(parts, np.array(begins), decode, "en", offset, last)
    return [((s.start, s.end), [(w.text, w.start, w.end) for w in s.words]) for s in found]


def test_words_are_shared_out_to_their_segments() -> None:
    first, second = ids(" a", " long", "er"), ids(" word", ".")
    begins = [0.2, 0.5, 0.8, 1.1, 1.4, 1.5]
    assert times((10.0, 11.0, first), (11.0, 12.0, second), begins=begins, offset=10.0, last=10.0) == [
        ((10.2, 11.1), [(" a", 10.2, 10.5), (" longer", 10.5, 11.1)]),
        ((11.1, 11.4), [(" word.", 11.1, 11.4)]),
    ]


def test_a_pause_after_a_sentence_belongs_to_no_word() -> None:
    """The mark is as long as two usual words, and so is the word after a mark."""
    found = times((0.0, 9.0, ids(" a", ".", " word", " a")), begins=[0.0, 0.2, 4.0, 4.2, 4.4])
    assert found == [((0.0, 4.4), [(" a.", 0.0, 0.2), (" word", 4.0, 4.2), (" a", 4.2, 4.4)])]
    found = times((0.0, 9.0, ids(" a", " word", ".", " word", " a")), begins=[0.0, 0.2, 0.4, 0.6, 4.0, 4.2])
    assert found[0][1] == [(" a", 0.0, 0.2), (" word.", 0.2, 0.4), (" word", 3.6, 4.0), (" a", 4.0, 4.2)]


def test_the_first_word_after_a_pause_is_not_the_pause() -> None:
    found = times((5.0, 6.0, ids(" a", " word", " a")), begins=[0.0, 5.2, 5.4, 5.6])
    assert found == [((4.8, 5.6), [(" a", 4.8, 5.2), (" word", 5.2, 5.4), (" a", 5.4, 5.6)])]


def test_the_last_word_ends_where_its_segment_does() -> None:
    found = times((0.0, 1.0, ids(" a", " word", " a")), begins=[0.0, 0.3, 0.6, 2.0])
    assert found == [((0.0, 1.0), [(" a", 0.0, 0.3), (" word", 0.3, 0.6), (" a", 0.6, 1.0)])]


def test_no_words_leave_the_times_alone() -> None:
    assert times((3.0, 4.0, []), begins=[0.0]) == [((3.0, 4.0), [])]
