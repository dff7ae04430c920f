"""From a window's tokens to text, segments and words, and to the window after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mstar.processing.text import TextRenderer
from mstar.spec.processor import Delta, Renderer, SegmentDelta, TextDelta, Word
from mstar.spec.request import Done, Emit, TokenLogprob
from mstar.spec.tasks import GenerateTask, TranscriptionTask
from mstar_asr.whisper import longform
from mstar_asr.whisper.longform import FRAMES_PER_S, Answer, Cut, History, Piece, Thresholds
from mstar_asr.whisper.spec import WhisperKnobs
from mstar_asr.whisper.tokens import WhisperTokens
from mstar_asr.whisper.window import Window
from mstar_asr.whisper.words import Spoken, token_times, word_times

__all__ = ["PlainRenderer", "WindowRenderer"]

Decode = Callable[[Sequence[int]], str]

_COMPLETE = ("stop", "length", "done")
"""Why a window's request ends that nobody has broken off; ``done`` with words, which are aligned after the answer."""
_REST = 5 * FRAMES_PER_S
_REST_SPEECH_S = 2.5
"""A window's end is heard again if it is longer than that, in frames, and somebody speaks in it for longer than this:
small models' timestamps are seconds off, and what was written down already must not be heard twice."""


class PlainRenderer(Renderer):
    """A native request without times: its text as it is written, without the timestamps in it."""

    def __init__(self, tokens: WhisperTokens, decode: Decode, task: GenerateTask, window: Window):
        special = range(tokens.eot, tokens.timestamp_begin + longform.STAMPS)
        self._text = TextRenderer(decode, task.stop, task.include_stop, hidden=special)
        self._silent, self._reports = window.silent, task.logprobs is not None
        self._began = False

    def feed(self, event: Emit) -> Iterable[Delta]:
        if self._silent:
            return ()
        deltas = self._trimmed(self._text.feed(event))
        self.finished = self._text.finished
        return deltas

    def finish(self, done: Done | None) -> Iterable[Delta]:
        return self._trimmed(self._text.finish(done))

    def _trimmed(self, deltas: Iterable[Delta]) -> list[Delta]:
        """*deltas* without the space that the first word begins with."""
        found: list[Delta] = []
        for delta in deltas:
            assert isinstance(delta, TextDelta)
            text = delta.text if self._began else delta.text.lstrip()
            self._began = self._began or bool(text)
            found.append(replace(delta, text=text, logprobs=delta.logprobs if self._reports else ()))
        return found


class WindowRenderer(Renderer):
    """One answer to one window of a transcription.

    Nothing is told of an answer before it is accepted, which is when it has ended, unless it cannot be refused any
    more: then the text of each segment goes out when the segment is complete.

    :param temperatures: of the first attempt and those after it.
    :param alone: there is no window after this one, so that what the model left unfinished is told as well.
    """

    def __init__(
        self,
        tokens: WhisperTokens,
        decode: Decode,
        task: TranscriptionTask,
        window: Window,
        temperatures: Sequence[float],
        *,
        alone: bool = False,
    ):
        assert isinstance(task.knobs, WhisperKnobs)
        self._tokens, self._decode, self._task, self._window = tokens, decode, task, window
        self._knobs, self._temperatures, self._alone = task.knobs, temperatures, alone
        self._words = "word" in task.timestamps or task.knobs.timestamps == "word"
        self._language = window.language
        self._said: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._no_speech = math.nan
        self._aligned: list[int] = []
        self._alignment: list[np.ndarray] = []
        self._told = 0
        """Pieces whose text has gone out."""

    # --- what comes

    def feed(self, event: Emit) -> Iterable[Delta]:
        match event.stream:
            case "text":
                self._said += event.data
                self._logprobs += event.logprobs or ()
                return self._settled()
            case "no_speech":
                self._no_speech = float(np.ravel(event.data)[0])
            case "language":
                self._language = self._tokens.language_of(int(np.ravel(event.data)[0]))
            case "aligned":
                self._aligned += [int(token) for token in np.ravel(event.data)]
            case "alignment":
                self._alignment.append(np.asarray(event.data, np.float32).reshape(-1, np.shape(event.data)[-1]))
        return ()

    def _settled(self) -> Iterator[Delta]:
        """The text of segments that nothing can take back."""
        thresholds = self._thresholds
        if self._more_attempts or self._window.silent or not self._no_speech <= thresholds.no_speech:
            return
        begin = self._tokens.timestamp_begin
        if any(a >= begin and b >= begin for a, b in pairwise(self._said)):
            yield from self._tell(self._cut(self._answer_tokens, rest=False).pieces)

    def _tell(self, pieces: Sequence[Piece]) -> Iterator[TextDelta]:
        """The text of those *pieces* that has not gone out."""
        at = sum(len(piece.tokens) for piece in pieces[: self._told])
        for piece in pieces[self._told :]:
            text, ids = self._text(piece), []
            reports: list[TokenLogprob] = []
            for place, token in enumerate(piece.tokens, at):
                if token < self._tokens.eot:
                    ids.append(token)
                    reports += self._logprobs[place : place + 1] if self._task.logprobs is not None else ()
            at += len(piece.tokens)
            if text:
                yield TextDelta(text, tuple(ids), tuple(reports))
        self._told = max(self._told, len(pieces))

    # --- at the end

    def finish(self, done: Done | None) -> Iterable[Delta]:
        if done is None or done.reason not in _COMPLETE:
            return ()
        window, thresholds = self._window, self._thresholds
        answer = self._answer()
        if self._more_attempts and longform.needs_fallback(answer, thresholds) and not window.silent:
            self.follow = window.again(self._language).task(self._task)
            return ()
        if window.silent or longform.is_silence(answer, thresholds):
            self._go_on(window.frames, window.history, window.last_word)
            return ()
        cut = self._cut(answer.tokens, rest=self._alone)
        told: list[Delta] = [*self._tell(cut.pieces), *self._accepted(answer, cut)]
        self._alignment = []  # large, and a clip's answers are kept until it ends
        return told

    def _accepted(self, answer: Answer, cut: Cut) -> Iterator[SegmentDelta]:
        window = self._window
        spoken = self._spoken(cut)
        seek, last_word = cut.seek, window.last_word
        ends = [part.words[-1].end for part in spoken if part.words]
        if ends:
            last_word = ends[-1]
            if not cut.whole and last_word > window.start_s:
                seek = round(last_word * FRAMES_PER_S) - window.seek
        said: list[int] = []
        for piece, part in zip(cut.pieces, spoken, strict=True):
            if text := self._text(piece):
                said += piece.tokens
                yield self._segment(answer, piece, part, text)
        history = window.history.after(said, answer.temperature, self._knobs.condition_on_previous_text)
        self._go_on(self._unheard(cut, seek), history, last_word)

    def _segment(self, answer: Answer, piece: Piece, part: Spoken, text: str) -> SegmentDelta:
        zero = self._window.start_s
        words = [Word(word.text, word.start - zero, word.end - zero) for word in part.words]
        language = self._language
        return SegmentDelta(
            part.start - zero,
            part.end - zero,
            text,
            tuple(words),
            "jv" if language == "jw" else language,
            piece.tokens,
            answer.temperature,
            answer.avg_logprob,
            answer.compression_ratio,
            0.0 if math.isnan(answer.no_speech_prob) else answer.no_speech_prob,
        )

    def _spoken(self, cut: Cut) -> list[Spoken]:
        """Times of the pieces, in seconds of the clip, and their words if they are wanted."""
        window = self._window
        times = [
            ((window.seek + piece.start) / FRAMES_PER_S, (window.seek + piece.end) / FRAMES_PER_S)
            for piece in cut.pieces
        ]
        if not self._words or not self._alignment:
            return [Spoken(start, end) for start, end in times]
        ids = [[token for token in piece.tokens if token < self._tokens.eot] for piece in cut.pieces]
        begins = token_times(np.concatenate(self._alignment), window.frames)
        segments = [(start, end, part) for (start, end), part in zip(times, ids, strict=True)]
        return word_times(segments, begins, self._decode, self._language, window.start_s, window.last_word)

    def _unheard(self, cut: Cut, seek: int) -> int:
        """Where the next window begins. An answer that ended long before the window did, with somebody speaking after
        its last word, is gone on with there: the reference would leave that out."""
        window = self._window
        heard = max((piece.end for piece in cut.pieces if self._text(piece)), default=0)
        if seek < window.frames or not self._knobs.vad_filter or not 0 < heard < window.frames - _REST:
            return max(seek, 1)
        rest = window.clip.speech_s(window.seek + heard, window.seek + window.frames)
        return heard if rest > _REST_SPEECH_S else seek

    def _go_on(self, frames: int, history: History, last_word: float) -> None:
        if self._alone:
            return
        window, skip = self._window, self._knobs.vad_filter
        following = window.after(
            window.seek + frames, history=history, language=self._language, last_word=last_word, skip=skip
        )
        self.follow = None if following is None else following.task(self._task)

    # --- what it is

    @property
    def _more_attempts(self) -> bool:
        return self._window.attempt + 1 < len(self._temperatures)

    @property
    def _thresholds(self) -> Thresholds:
        knobs = self._knobs
        return Thresholds(knobs.compression_ratio_threshold, knobs.logprob_threshold, knobs.no_speech_threshold)

    @property
    def _answer_tokens(self) -> tuple[int, ...]:
        eot = self._tokens.eot
        return tuple(self._said[:-1] if self._said[-1:] == [eot] else self._said)

    def _answer(self) -> Answer:
        tokens = self._answer_tokens
        text = self._decode([token for token in tokens if token < self._tokens.eot]).strip()
        return Answer(
            tokens,
            sum(report.logprob for report in self._logprobs) / (len(tokens) + 1),
            self._no_speech,
            longform.compression_ratio(text),
            self._temperatures[self._window.attempt],
        )

    def _cut(self, tokens: Sequence[int], rest: bool) -> Cut:
        return longform.cut(tokens, self._tokens.timestamp_begin, self._window.frames, rest=rest)

    def _text(self, piece: Piece) -> str:
        """Empty for one that lasts no time, or has none but blanks: the reference drops them."""
        text = self._decode([token for token in piece.tokens if token < self._tokens.eot])
        return text if text.strip() and piece.start != piece.end else ""
