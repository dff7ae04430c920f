"""Whisper's way through a long clip: windows of 30 s, each answer judged, the next window where the last segment ended.

Functions of token ids and numbers alone. Reference: openai-whisper 20250625, ``whisper/transcribe.py`` (``transcribe``)
and ``whisper/decoding.py``. transformers 5.24 (``generation_whisper.py``) does the same, except that it measures
compression on token ids and leaves both timestamps of a pair at the end of a window's last segment.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from mstar_asr.whisper.request import FRAMES, HOP, RATE

__all__ = [
    "FRAMES_PER_S", "STAMPS", "STRIDE", "Answer", "Cut", "History", "Piece", "Thresholds", "compression_ratio", "cut",
    "frames_of", "is_silence", "needs_fallback", "temperatures",
]  # fmt: skip

FRAMES_PER_S = RATE // HOP
STRIDE = 2
"""Frames from one timestamp token to the next: 0.02 s."""
STAMPS = FRAMES // STRIDE + 1
"""Timestamp tokens: 0.00 to 30.00."""

_FORGETFUL = 0.5
"""An answer sampled at a higher temperature than this is no context for the next one."""


def frames_of(samples: int) -> int:
    """Frames of a clip of so many samples at 16 kHz; what follows the last whole one is not heard."""
    return samples // HOP


@dataclass(frozen=True)
class Answer:
    """What the model said to one window.

    :param tokens: without the end of text, timestamps included.
    :param avg_logprob: sum of the log-probabilities of *tokens* and the end of text, by their number.
    :param no_speech_prob: NaN where the vocabulary has no such token. :param compression_ratio: of its text.
    """

    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float = 0.0


def temperatures(first: float, step: float) -> tuple[float, ...]:
    """*first* and what is tried after it, up to 1."""
    count = int((1.0 + 1e-6 - first) / step) + 1 if step > 0 else 1
    return tuple(round(first + step * number, 6) for number in range(max(count, 1)))


@dataclass(frozen=True)
class Thresholds:
    """When an answer is no good.

    :param compression_ratio: a higher one says that the text repeats itself. :param logprob: a lower mean says that the
        model guessed. :param no_speech: with a higher probability of silence a guess is taken for silence.
    """

    compression_ratio: float = 2.4
    logprob: float = -1.0
    no_speech: float = 0.6


def compression_ratio(text: str) -> float:
    """Bytes of *text* by its bytes compressed: 0.1 for a word, above 2.4 for a phrase over and over."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def needs_fallback(answer: Answer, thresholds: Thresholds) -> bool:
    """Whether the window is to be heard again at the next higher temperature."""
    guessed = answer.avg_logprob < thresholds.logprob
    if guessed and answer.no_speech_prob > thresholds.no_speech:
        return False  # silence: hearing it again would not help
    return guessed or answer.compression_ratio > thresholds.compression_ratio


def is_silence(answer: Answer, thresholds: Thresholds) -> bool:
    """Whether nobody spoke in the window, whatever the answer says."""
    return answer.no_speech_prob > thresholds.no_speech and answer.avg_logprob <= thresholds.logprob


@dataclass(frozen=True)
class Piece:
    """A segment as the timestamps tell it. Times in frames from the window's start."""

    start: int
    end: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A window's answer in segments.

    :param seek: frames from this window's start to the next one's. :param whole: the answer ended with a single
        timestamp: after it nobody speaks in this window.
    """

    pieces: tuple[Piece, ...]
    seek: int
    whole: bool


def cut(tokens: Sequence[int], begin: int, frames: int, *, rest: bool = False) -> Cut:
    """The segments of an answer.

    :param tokens: ids without the end of text. :param begin: id of the timestamp 0.00. :param frames: of the window
        that belong to the clip, 1…3000. :param rest: what is unfinished is a segment too, up to the window's end.

    Two timestamps in a row end one segment and begin the next. What follows the last such pair is unfinished, and the
    next window begins there; but after a single timestamp at the end there is nothing more to hear. An answer without
    pairs is one segment, up to its last timestamp if it has one.
    """
    stamps = [token >= begin for token in tokens]
    whole = stamps[-2:] == [False, True]
    ends = [at for at in range(1, len(tokens)) if stamps[at - 1] and stamps[at]]
    if not ends:
        last = next((token - begin for token in reversed(tokens) if token >= begin), 0)
        # no timestamp, or only 0.00: as long as the window
        return Cut((Piece(0, last * STRIDE or frames, tuple(tokens)),), frames, whole)
    if whole:
        ends.append(len(tokens))
    pieces, first = [], 0
    for end in ends:
        part = tuple(tokens[first:end])
        pieces.append(Piece((part[0] - begin) * STRIDE, (part[-1] - begin) * STRIDE, part))
        first = end
    if rest and first < len(tokens):
        pieces.append(Piece((tokens[first] - begin) * STRIDE, frames, tuple(tokens[first:])))
    return Cut(tuple(pieces), frames if whole else (tokens[first - 1] - begin) * STRIDE, whole)


@dataclass(frozen=True)
class History:
    """What the next window's prompt is made of: tokens of the client's prompt at first, then those of the segments.
    The prompt takes as many of the last ones as the decoder has room for."""

    tokens: tuple[int, ...] = ()

    def after(self, said: Sequence[int], temperature: float, condition: bool) -> History:
        """This history once *said* was accepted. Not *condition*, or a high *temperature*: the next window begins
        without context, the client's prompt included."""
        if not condition or temperature > _FORGETFUL:
            return History()
        return History((*self.tokens, *said))
