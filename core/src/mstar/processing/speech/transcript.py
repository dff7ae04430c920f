"""What was said, in one piece: windows joined in order, and the formats that it is written in."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.processing.speech.languages import name_of
from mstar.spec.processor import Delta, SegmentDelta, TextDelta, Word
from mstar.spec.request import TokenLogprob

__all__ = ["Segment", "Transcript", "TranscriptBuilder", "segment_object", "srt", "verbose", "vtt"]


@dataclass(frozen=True)
class Segment:
    """A piece of a transcript. *said*: with times from the clip's start. *seek*: where its window began, in seconds."""

    said: SegmentDelta
    seek: float


@dataclass(frozen=True)
class Transcript:
    """The words of one clip. :param language: a code, if the model named one. :param duration: of the clip, in seconds.
    :param finish_reason: ``length``: an answer ended at its limit of tokens; ``cancelled``: one was broken off. Words
    may be missing then."""

    text: str
    duration: float
    language: str | None = None
    segments: tuple[Segment, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None

    @property
    def words(self) -> list[Word]:
        return [word for segment in self.segments for word in segment.said.words]


@dataclass
class _Window:
    """The window that is being heard."""

    start: float
    end: float
    text: str = ""
    held: str = ""
    segments: list[SegmentDelta] = field(default_factory=list)


class TranscriptBuilder:
    """Joins the deltas of windows, which come one window after the other: :meth:`open`, :meth:`feed`…, :meth:`close`.

    What :meth:`feed` returns, all together, is the transcript's text: who streams it says the same as who waits. A
    window's words are set apart from those before it by a space where its script has spaces. Times never run backwards,
    and no segment leaves its window.
    """

    def __init__(self, duration: float):
        self.duration = duration
        self._text: list[str] = []
        self._segments: list[Segment] = []
        self._logprobs: list[TokenLogprob] = []
        self._language: str | None = None
        self._window: _Window | None = None
        self._last = ""
        self._finish_reason: str | None = None

    def open(self, start: float, end: float) -> None:
        """A window from *start* to *end* seconds."""
        self.close()
        self._window = _Window(start, end)

    def feed(self, delta: Delta) -> tuple[str, Segment | None]:
        """New text, and the segment that *delta* is, if it is one."""
        window = self._window
        assert window is not None, "open a window first"
        if isinstance(delta, TextDelta):
            self._logprobs += delta.logprobs
            return self._take(window, delta.text), None
        if isinstance(delta, SegmentDelta):
            self._language = self._language or delta.language
            shifted = _shifted(delta, window.start, self._segments[-1].said.end if self._segments else 0.0, window.end)
            segment = Segment(shifted, window.start)
            window.segments.append(shifted)
            self._segments.append(segment)
            return "", segment
        return "", None

    def _take(self, window: _Window, text: str) -> str:
        text = window.held + text
        if not window.text:
            text = text.lstrip()
        kept = text.rstrip()
        window.held = text[len(kept) :]
        if not kept:
            return ""
        if not window.text and self._last and _spaced(self._last, kept[0]):
            self._text.append(" ")
            said = " " + kept
        else:
            said = kept
        window.text += kept
        self._text.append(kept)
        self._last = kept[-1]
        return said

    def close(self, finish_reason: str | None = None) -> Segment | None:
        """The open window, if any, has ended. Where the model told no times, the window's text is a segment."""
        if finish_reason == "cancelled" or (finish_reason == "length" and self._finish_reason is None):
            self._finish_reason = finish_reason
        window, self._window = self._window, None
        if window is None:
            return None
        if window.segments or not window.text:
            return None
        segment = Segment(SegmentDelta(window.start, window.end, window.text), window.start)
        self._segments.append(segment)
        return segment

    def result(self, language: str | None = None) -> Transcript:
        """The transcript. *language*: what the client said that it is, for models that do not tell."""
        return Transcript(
            "".join(self._text), self.duration, self._language or language, tuple(self._segments),
            tuple(self._logprobs), self._finish_reason,
        )  # fmt: skip


def _shifted(delta: SegmentDelta, offset: float, low: float, high: float) -> SegmentDelta:
    def at(seconds: float) -> float:
        return min(max(seconds + offset, low), high)

    words, last = [], at(delta.start)
    for word in delta.words:
        start = max(at(word.start), last)
        last = max(at(word.end), start)
        words.append(Word(word.text, start, last))
    start = at(delta.start)
    return dataclasses.replace(delta, start=start, end=max(at(delta.end), start), words=tuple(words))


# Lao, Thai, Khmer, Myanmar: words follow each other without spaces, as in Chinese and Japanese.
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF))


def _spaced(before: str, after: str) -> bool:
    """Whether a space stands between two characters that windows end and begin with."""
    return not (_unspaced(before) and _unspaced(after))


def _unspaced(char: str) -> bool:
    if any(low <= ord(char) <= high for low, high in _UNSPACED):
        return True
    # Hangul is wide too, and has spaces
    return unicodedata.east_asian_width(char) in "WF" and not unicodedata.name(char, "").startswith("HANGUL")


# --- formats


def srt(transcript: Transcript) -> str:
    """SubRip: numbered cues with times as ``00:00:01,500``."""
    cues = []
    for number, (start, end, text) in enumerate(_cues(transcript.segments), 1):
        plain = text.replace("-->", "->")  # there is no way to write an arrow
        cues.append(f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{plain}\n")
    return "\n".join(cues)


def vtt(transcript: Transcript) -> str:
    """WebVTT: cues with times as ``00:00:01.500``."""
    cues = (
        f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_escaped(text)}\n"
        for start, end, text in _cues(transcript.segments)
    )
    return "WEBVTT\n\n" + "\n".join(cues)


def _cues(segments: Sequence[Segment]) -> Iterator[tuple[float, float, str]]:
    for segment in segments:
        lines = (line.strip() for line in segment.said.text.splitlines())
        text = "\n".join(filter(None, lines))  # an empty line would end the cue
        if text:
            yield segment.said.start, segment.said.end, text


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def verbose(transcript: Transcript, task: str, timestamps: Iterable[str]) -> dict[str, Any]:
    """OpenAI's ``verbose_json``, as plain data.

    :param task: ``transcribe`` or ``translate``. :param timestamps: of ``segment`` and ``word``, those to show.
    """
    known = transcript.language
    body: dict[str, Any] = {
        "task": task,
        "language": None if known is None else name_of(known).lower(),
        "duration": round(transcript.duration, 3),
        "text": transcript.text,
    }
    shown = set(timestamps)
    if "word" in shown:
        body["words"] = [
            {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
            for word in transcript.words
        ]
    if "segment" in shown:
        body["segments"] = [segment_object(number, segment) for number, segment in enumerate(transcript.segments)]
    return body


def segment_object(number: int, segment: Segment) -> dict[str, Any]:
    """A segment as OpenAI spells it. ``seek`` counts hundredths of a second."""
    said = segment.said
    return {
        "id": number,
        "seek": round(segment.seek * 100),
        "start": round(said.start, 3),
        "end": round(said.end, 3),
        "text": said.text,
        "tokens": list(said.tokens),
        "temperature": said.temperature,
        "avg_logprob": said.avg_logprob,
        "compression_ratio": said.compression_ratio,
        "no_speech_prob": said.no_speech_prob,
    }
