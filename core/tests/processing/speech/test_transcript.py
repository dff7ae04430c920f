"""Windows become one transcript: nothing lost, nothing twice, times in order; its formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.processing.speech.transcript import Transcript, TranscriptBuilder, srt, verbose, vtt
from mstar.spec.processor import SegmentDelta, TextDelta, Word


def joined(*windows: list[str], length: float = 10.0) -> tuple[Transcript, str]:
    """The transcript of windows' texts, and what was streamed of it."""
    builder, said = TranscriptBuilder(length * len(windows)), ""
    for number, texts in enumerate(windows):
        builder.open(number * length, (number + 1) * length)
        said += "".join(builder.feed(TextDelta(text))[0] for text in texts)
        builder.close()
    return builder.result(), said


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([["Hello", " there."], [" And", " so on. "]], "Hello there. And so on."),
        ([["  one "], [""], ["   "], ["two"]], "one two"),
        ([["你好"], ["世界"]], "你好世界"),
        ([["안녕"], ["세계"]], "안녕 세계"),
        ([["สวัสดี"], ["ครับ"]], "สวัสดีครับ"),
        ([["你好"], ["world"]], "你好 world"),
        ([["a \n"], ["b"]], "a b"),
        ([[]], ""),
    ],
)
def test_windows_are_joined(windows: list[list[str]], text: str) -> None:
    transcript, said = joined(*windows)
    assert transcript.text == said == text


@given(st.lists(st.lists(st.text("ab 世 \n", max_size=5), max_size=4), max_size=4))
def test_streamed_is_whole(windows: list[list[str]]) -> None:
    transcript, said = joined(*windows)
    assert transcript.text == said == said.strip()
    whole = ["".join(texts).strip() for texts in windows]
    assert "".join(transcript.text.split()) == "".join("".join(whole).split())
    assert [s.said.text for s in transcript.segments] == [text for text in whole if text]


def test_a_window_without_times_is_a_segment() -> None:
    transcript, _ = joined(["one"], [" "], ["three"])
    assert [(s.said.start, s.said.end, s.said.text, s.seek) for s in transcript.segments] == [
        (0.0, 10.0, "one", 0.0),
        (20.0, 30.0, "three", 20.0),
    ]


def told() -> Transcript:
    builder = TranscriptBuilder(15.0)
    builder.open(0.0, 10.0)
    builder.feed(TextDelta("one two"))
    builder.feed(SegmentDelta(1.0, 4.0, "one", (Word("one", 1.5, 2.0),), "de"))
    builder.feed(SegmentDelta(3.5, 11.0, "two", (Word(" two", 3.0, 5.0),)))  # overlaps, and leaves its window
    builder.close()
    builder.open(10.0, 15.0)
    builder.feed(TextDelta("a < b --> c"))
    builder.feed(SegmentDelta(0.5, 1.25, " a < b\n\n--> c ", (Word("a", 0.5, 0.6),)))
    builder.close("length")
    return builder.result("en")


def test_times_are_the_clips_and_go_forward() -> None:
    transcript = told()
    assert [(s.said.start, s.said.end) for s in transcript.segments] == [(1.0, 4.0), (4.0, 10.0), (10.5, 11.25)]
    assert [(w.text, w.start, w.end) for w in transcript.words] == [
        ("one", 1.5, 2.0), (" two", 4.0, 5.0), ("a", 10.5, 10.6),
    ]  # fmt: skip
    assert (transcript.language, transcript.finish_reason) == ("de", "length")


def test_subtitles() -> None:
    assert srt(told()) == (
        "1\n00:00:01,000 --> 00:00:04,000\none\n\n2\n00:00:04,000 --> 00:00:10,000\ntwo\n\n"
        "3\n00:00:10,500 --> 00:00:11,250\na < b\n-> c\n"
    )
    assert vtt(told()) == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:04.000\none\n\n00:00:04.000 --> 00:00:10.000\ntwo\n\n"
        "00:00:10.500 --> 00:00:11.250\na &lt; b\n--&gt; c\n"
    )
    hours = Transcript("x", 9000.0, segments=joined(["x"], length=8999.9996)[0].segments)
    assert "00:00:00,000 --> 02:30:00,000" in srt(hours)


def test_verbose() -> None:
    body = verbose(told(), "transcribe", ("segment",))
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "german", 15.0)
    assert [(s["id"], s["seek"]) for s in body["segments"]] == [(0, 0), (1, 0), (2, 1000)]
    assert "words" not in body
    assert [w["word"] for w in verbose(told(), "transcribe", ("word",))["words"]] == ["one", "two", "a"]
    assert verbose(Transcript("", 1.0), "transcribe", ())["language"] is None
