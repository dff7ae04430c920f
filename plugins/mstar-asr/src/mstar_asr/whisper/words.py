"""When each word was said: Whisper's cross-attention, followed in time.

Some of the decoder's heads look at the place in the sound that the token is about. Their weights, smoothed by the
model's side, are a map of tokens against time, and the best monotonic path through it says when each token begins.

Reference: openai-whisper 20250625, ``whisper/timing.py`` (``find_alignment``, ``add_word_timestamps``,
``merge_punctuations``) and ``whisper/tokenizer.py`` (``split_to_word_tokens``), whose results these are.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mstar_asr.whisper.longform import STRIDE

__all__ = ["Spoken", "TimedWord", "dtw", "merge_punctuation", "split_words", "token_times", "word_times"]

Decode = Callable[[Sequence[int]], str]

_PER_SECOND = 50  # positions of the encoder
_LONGEST_MEDIAN_S = 0.7
_SENTENCE_ENDS = ".。!！?？"
_PREPENDED = "\"'“¿([{-"
_APPENDED = "\"'.。,，!！?？:：”)]}、"
_UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TimedWord:
    """A word with the spaces and marks around it. Times in seconds, at last from the clip's start."""

    text: str
    tokens: tuple[int, ...]
    start: float
    end: float


def dtw(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest monotonic path through *cost* ``[rows, columns]``, from corner to corner: (rows, columns) of its
    steps, int64.

    Sums are float32, and of equal ones the step along a row is taken, as in the reference. Its two loops are one over
    anti-diagonals here, whose cells do not depend on each other.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    trace = np.full((rows + 1, columns + 1), 2, dtype=np.int8)  # 0 both, 1 down, 2 along
    trace[1:, 0] = 1
    total[0, 0] = 0
    for diagonal in range(2, rows + columns + 1):
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, along = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_both = (both < down) & (both < along)
        is_down = (down < both) & (down < along)
        trace[i, j] = np.where(is_both, 0, np.where(is_down, 1, 2))
        total[i, j] = cost[i - 1, j - 1] + np.where(is_both, both, np.where(is_down, down, along))
    i, j = rows, columns
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = trace[i, j]
        i -= step != 2
        j -= step != 1
    steps = np.array(path[::-1], dtype=np.int64).reshape(-1, 2)
    return steps[:, 0], steps[:, 1]


def token_times(alignment: np.ndarray, frames: int) -> np.ndarray:
    """When each token begins, in seconds from the window's start, float64 ``[tokens]``.

    :param alignment: stream ``alignment`` (:mod:`mstar_asr.whisper.request`), float32 ``[tokens, positions]``; the last
        token is the end of text, so that its time is where the others end. :param frames: of the window that belong to
        the clip.
    """
    rows, columns = dtw(-alignment[:, : max(1, frames // STRIDE)].astype(np.float64))
    begins = np.concatenate([[True], np.diff(rows) > 0])
    return np.asarray(columns[begins] / _PER_SECOND)


# --- tokens to words


def split_words(tokens: Sequence[int], decode: Decode, language: str | None) -> list[tuple[str, tuple[int, ...]]]:
    """Text *tokens* as (word, its tokens). In languages that write no spaces each character is one."""
    pieces = _characters(tokens, decode)
    if language in _UNSPACED:
        return pieces
    words: list[tuple[str, tuple[int, ...]]] = []
    for text, part in pieces:
        if not words or text.startswith(" ") or text.strip() in string.punctuation:
            words.append((text, part))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + part)
    return words


def _characters(tokens: Sequence[int], decode: Decode) -> list[tuple[str, tuple[int, ...]]]:
    """The smallest runs of *tokens* that decode to whole characters."""
    whole = decode(tokens)
    pieces: list[tuple[str, tuple[int, ...]]] = []
    run: list[int] = []
    done = 0
    for token in tokens:
        run.append(token)
        text = decode(run)
        at = done + text.find(_REPLACEMENT)
        # a replacement character that the whole text has too is one that the model has said
        if _REPLACEMENT not in text or whole[at : at + 1] == _REPLACEMENT:
            pieces.append((text, tuple(run)))
            run, done = [], done + len(text)
    if run:  # broken off within a character
        pieces.append((decode(run), tuple(run)))
    return pieces


def merge_punctuation(words: Sequence[TimedWord]) -> list[TimedWord]:
    """*words* with opening marks joined to the word after them, and closing ones to the word before."""
    opened: list[TimedWord] = []  # from the last to the first
    for word in reversed(words):
        if opened and word.text.startswith(" ") and word.text.strip() in _PREPENDED:
            after = opened[-1]
            opened[-1] = replace(after, text=word.text + after.text, tokens=word.tokens + after.tokens)
        else:
            opened.append(word)
    closed: list[TimedWord] = []
    for word in reversed(opened):
        if closed and not closed[-1].text.endswith(" ") and word.text in _APPENDED:
            before = closed[-1]
            closed[-1] = replace(before, text=before.text + word.text, tokens=before.tokens + word.tokens)
        else:
            closed.append(word)
    return closed


# --- words to segments


@dataclass(frozen=True)
class Spoken:
    """A segment's times and words, in seconds from the clip's start."""

    start: float
    end: float
    words: tuple[TimedWord, ...] = ()


def word_times(
    segments: Sequence[tuple[float, float, Sequence[int]]],
    begins: np.ndarray,
    decode: Decode,
    language: str | None,
    offset: float,
    last_end: float,
) -> list[Spoken]:
    """Words of a window's *segments*, and the segments' times as the words correct them.

    :param segments: (start, end, text tokens), in seconds from the clip's start, as *last_end*, which is when the last
        word before this window ended, and *offset*, where the window begins.
    :param begins: of all segments' tokens, as :func:`token_times` returns it.
    """
    tokens = [token for _, _, part in segments for token in part]
    words = _timed(split_words(tokens, decode, language), begins)
    lengths = np.array([word.end - word.start for word in words if word.end != word.start])
    median = min(_LONGEST_MEDIAN_S, float(np.median(lengths))) if len(lengths) else 0.0
    if len(lengths):
        words = _shorter_at_sentence_ends(words, median * 2)
    words = merge_punctuation(words)
    found, at = [], 0
    for start, end, part in segments:
        taken, count = [], 0
        while at < len(words) and count < len(part):
            taken.append(words[at])
            count += len(words[at].tokens)
            at += 1
        spoken = _fitted(start, end, [_moved(word, offset) for word in taken], median, last_end)
        if spoken.words:
            last_end = spoken.end
        found.append(spoken)
    return found


def _timed(words: Sequence[tuple[str, tuple[int, ...]]], begins: np.ndarray) -> list[TimedWord]:
    timed, at = [], 0
    for text, tokens in words:
        timed.append(TimedWord(text, tokens, float(begins[at]), float(begins[at + len(tokens)])))
        at += len(tokens)
    return timed


def _moved(word: TimedWord, offset: float) -> TimedWord:
    return replace(word, start=round(offset + word.start, 2), end=round(offset + word.end, 2))


def _shorter_at_sentence_ends(words: list[TimedWord], longest: float) -> list[TimedWord]:
    """A pause between sentences belongs to neither: the mark before it, or the word after it, is cut short."""
    cut = words[:1]
    for word in words[1:]:
        if word.end - word.start > longest:
            if word.text in _SENTENCE_ENDS:
                word = replace(word, end=word.start + longest)
            elif cut[-1].text in _SENTENCE_ENDS:
                word = replace(word, start=word.end - longest)
        cut.append(word)
    return cut


def _fitted(start: float, end: float, words: list[TimedWord], median: float, last_end: float) -> Spoken:
    """A segment from its own times and those of its words, where each is believed unless it is implausibly long."""
    if not words:
        return Spoken(start, end)
    longest = median * 2
    first = words[0]
    second = words[1] if len(words) > 1 else None
    after_pause = first.end - last_end > median * 4
    if after_pause and (
        first.end - first.start > longest or (second is not None and second.end - first.start > longest * 2)
    ):
        if second is not None and second.end - second.start > longest:
            border = max(second.end / 2, second.end - longest)
            first, words[1] = replace(first, end=border), replace(second, start=border)
        first = words[0] = replace(first, start=max(0.0, first.end - longest))
    if start < first.end and start - 0.5 > first.start:
        words[0] = replace(first, start=max(0.0, min(first.end - median, start)))
    else:
        start = first.start
    last = words[-1]
    if end > last.start and end + 0.5 < last.end:
        words[-1] = replace(last, end=max(last.start + median, end))
    else:
        end = last.end
    return Spoken(start, end, tuple(words))
