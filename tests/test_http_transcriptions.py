"""Transcriptions and translations through a real server, asked as OpenAI's client asks."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from mstar.testing.miniatures.catalog import spoken

from .serving import Server, serving

RATE = 8000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_ctc", "mini_chat")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wav(samples: np.ndarray, rate: int = RATE, kind: str = "WAV") -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind)
    return out.getvalue()


def clip(text: str, rate: int = RATE) -> tuple[str, bytes]:
    return ("clip.wav", wav(spoken(text, rate), rate))


def post(server: Server, route: str = "transcriptions", data: bytes = b"", **fields: Any) -> Any:
    file = {"file": ("clip.wav", data or clip("hello there")[1])}
    return server.http.post(f"/v1/audio/{route}", data={"model": "mini_ctc", **fields}, files=file)


def test_a_clip_becomes_text(client: openai.OpenAI, server: Server) -> None:
    reply = client.audio.transcriptions.create(model="mini_ctc", file=clip("hello there\ngoodbye"))
    assert reply.text == "hello there goodbye"
    assert (reply.usage.type, reply.usage.seconds) == ("duration", 0.86)
    assert not any(pool["used"] for pool in server.pools()["mini_ctc"].values())


@pytest.mark.parametrize("rate", [8000, 16000, 24000, 44100, 48000])
def test_any_rate(client: openai.OpenAI, rate: int) -> None:
    assert client.audio.transcriptions.create(model="mini_ctc", file=clip("hello", rate)).text == "hello"


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF"])
def test_containers_without_loss(server: Server, kind: str) -> None:
    assert post(server, data=wav(spoken("hello"), kind=kind)).json()["text"] == "hello"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI's model of it is
def test_translations_are_english(client: openai.OpenAI) -> None:
    reply = client.audio.translations.create(model="mini_ctc", file=clip("hallo"))
    assert reply.text == "HALLO"
    verbose = client.audio.translations.create(model="mini_ctc", file=clip("hallo"), response_format="verbose_json")
    assert (verbose.text, verbose.segments[0].text, verbose.to_dict()["task"]) == ("HALLO", "HALLO", "translate")


def test_verbose_has_segments_without_being_asked_for_them(client: openai.OpenAI) -> None:
    reply = client.audio.transcriptions.create(
        model="mini_ctc", file=clip("ab cd\nef"), response_format="verbose_json", language="en"
    )
    assert (reply.text, reply.language, reply.duration, reply.words) == ("ab cd ef", "english", 0.64, None)
    assert [(s.id, s.start, s.end, s.text) for s in reply.segments] == [(0, 0.0, 0.1, "ab cd"), (1, 0.6, 0.64, "ef")]
    assert all(isinstance(s.tokens, list) and s.seek == 0 for s in reply.segments)


def test_words_have_times(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "mini_ctc", "file": clip("ab cd\nef"), "response_format": "verbose_json"}
    words = client.audio.transcriptions.create(**ask, timestamp_granularities=["word"])
    assert [(w.word, w.start, w.end) for w in words.words] == [("ab", 0.0, 0.04), ("cd", 0.06, 0.1), ("ef", 0.6, 0.64)]
    assert words.segments is None
    both = client.audio.transcriptions.create(**ask, timestamp_granularities=["word", "segment"])
    assert both.words == words.words
    assert len(both.segments) == 2


def seconds(clock: str) -> float:
    hours, minutes, rest = clock.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


@pytest.mark.parametrize(
    ("response_format", "media_type", "point"),
    [("srt", "application/x-subrip", ","), ("vtt", "text/vtt", r"\.")],
)
def test_subtitles(server: Server, response_format: str, media_type: str, point: str) -> None:
    reply = post(server, data=wav(spoken("one\ntwo\n\n\nthree")), response_format=response_format)
    assert reply.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert reply.text.startswith("WEBVTT\n\n" if response_format == "vtt" else "1\n")
    clock = rf"\d\d:\d\d:\d\d{point}\d\d\d"
    cues = re.findall(rf"^({clock}) --> ({clock})\n(.+)\n", reply.text, re.MULTILINE)
    assert [text for _, _, text in cues] == ["one", "two", "three"]
    times = [seconds(clock) for start, end, _ in cues for clock in (start, end)]
    assert times == sorted(times) == [0.0, 0.06, 0.56, 0.62, 2.12, 2.22]


def test_plain_text(client: openai.OpenAI, server: Server) -> None:
    reply = post(server, response_format="text")
    assert (reply.text, reply.headers["content-type"]) == ("hello there\n", "text/plain; charset=utf-8")
    told = client.audio.transcriptions.create(model="mini_ctc", file=clip("hello"), response_format="text")
    assert told == "hello\n"


LONG = "\n".join(["hello there", "how are you"] * 130)
"""About three minutes, with pauses."""


def test_a_clip_longer_than_the_model_hears(client: openai.OpenAI) -> None:
    """All of it, in any format, in order; times go on."""
    samples = spoken(LONG)
    assert 180 < len(samples) / RATE < 200
    file = ("clip.wav", wav(samples))
    reply = client.audio.transcriptions.create(model="mini_ctc", file=file, response_format="verbose_json")
    expected = LONG.replace("\n", " ")
    assert reply.text == expected
    assert client.audio.transcriptions.create(model="mini_ctc", file=file).text == expected
    assert len(reply.segments) == 260
    assert [s.text for s in reply.segments] == LONG.split("\n")
    for number, segment in enumerate(reply.segments):
        assert segment.start == pytest.approx(number * 0.72, abs=0.011)
        assert segment.end - segment.start == pytest.approx(0.22, abs=0.001)
    assert len({s.seek for s in reply.segments}) == 14


def test_windows_as_long_as_the_request_says(server: Server) -> None:
    samples = wav(spoken("\n".join(["abc"] * 8)))  # 0.06 s every 0.56 s
    for window, windows in (("4.1", 1), ("2", 3), ("1", 5)):
        body = post(server, data=samples, window_seconds=window, response_format="verbose_json").json()
        assert len({s["seek"] for s in body["segments"]}) == windows
        assert body["text"] == " ".join(["abc"] * 8)
    reply = post(server, data=samples, window_seconds="41")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "window_seconds")


@pytest.mark.parametrize("text", ["hello there", LONG, "\n"], ids=["short", "long", "silence"])
def test_streamed_is_whole(client: openai.OpenAI, text: str) -> None:
    file = ("clip.wav", wav(spoken(text)))
    whole = client.audio.transcriptions.create(model="mini_ctc", file=file)
    events = list(client.audio.transcriptions.create(model="mini_ctc", file=file, stream=True))
    assert [e.type for e in events].count("transcript.text.done") == 1
    assert events[-1].type == "transcript.text.done"
    assert "".join(e.delta for e in events[:-1]) == events[-1].text == whole.text
    assert events[-1].usage.total_tokens == events[-1].usage.input_tokens + events[-1].usage.output_tokens


def test_segments_are_streamed_where_they_were_asked_for(client: openai.OpenAI) -> None:
    events = list(
        client.audio.transcriptions.create(
            model="mini_ctc", file=clip("ab\ncd"), stream=True, response_format="verbose_json"
        )
    )
    segments = [e for e in events if e.type == "transcript.text.segment"]
    assert [(s.id, s.text, s.start, s.end) for s in segments] == [
        ("seg_0", "ab", 0.0, 0.04),
        ("seg_1", "cd", 0.54, 0.58),
    ]


TIME = np.arange(45 * RATE) / RATE


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(45 * RATE),
        0.3 * np.sin(2 * np.pi * 440 * TIME),
        np.random.default_rng(5).normal(0, 0.1, 10 * RATE).clip(-1, 1),
        np.zeros(80),
    ],
    ids=["silence", "tone", "noise", "10 ms"],
)
def test_nothing_said_is_nothing_written(server: Server, samples: np.ndarray) -> None:
    for response_format in ("json", "verbose_json"):
        reply = post(server, data=wav(samples), response_format=response_format)
        assert (reply.status_code, reply.json()["text"]) == (200, ""), reply.text
    assert post(server, data=wav(samples), response_format="srt").text == ""


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"response_format": "xml"}, "response_format", 400),
        ({"response_format": "diarized_json"}, "response_format", 400),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", 400),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "phone"}, "timestamp_granularities[0]", 400),
        ({"include[]": "logprobs"}, "include", 400),
        ({"include[]": "logprobs", "response_format": "text"}, "include", 400),
        ({"langauge": "en"}, "langauge", 400),
        ({"temperature": "hot"}, "temperature", 400),
        ({"temperature": "-1"}, "temperature", 400),
        ({"temperature": "nan"}, "temperature", 400),
        ({"stream": "perhaps"}, "stream", 400),
        ({"stream": "true", "response_format": "srt"}, "stream", 400),
        ({"chunking_strategy": "often"}, "chunking_strategy", 400),
        ({"chunking_strategy": '{"type": "client_vad"}'}, "chunking_strategy.type", 400),
        ({"chunking_strategy": '{"type": "server_vad", "silence": 3}'}, "chunking_strategy.silence", 400),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names", 400),
        ({"max_tokens": "many"}, "max_tokens", 400),
        ({"max_tokens": "0"}, "max_tokens", 400),
        ({"ignore_eos": "yes"}, "ignore_eos", 400),
        ({"language": "x" * 65}, "language", 400),
        ({"model": "mini_chat"}, "model", 400),
        ({"model": "nobody"}, "model", 404),
    ],
)
def test_wrong_fields_are_named(server: Server, fields: dict[str, str], param: str, status: int) -> None:
    reply = post(server, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_wrong_names_get_the_nearest(server: Server) -> None:
    assert "did you mean 'language'" in post(server, langauge="en").json()["error"]["message"]
    reply = server.http.post("/v1/audio/transcriptions", data={"model": "mini_ctc"}, files={"fil": clip("a")})
    assert "did you mean 'file'" in reply.json()["error"]["message"]
    reply = server.http.post("/v1/chat/completions", json={"model": "mini_ctc", "messages": [{"role": "user"}]})
    assert "/v1/audio/transcriptions" in reply.json()["error"]["message"]


def test_accepted_and_known_fields(server: Server) -> None:
    fields = {
        "temperature": "0", "prompt": "names", "chunking_strategy": '{"type": "server_vad", "threshold": 0.4}',
        "max_tokens": "8", "ignore_eos": "true", "language": "de", "stream": "false",
    }  # fmt: skip
    assert post(server, **fields).json()["text"] == "hello there"


@pytest.mark.parametrize(
    ("files", "status", "param"),
    [
        ({}, 400, "file"),
        ({"file": ("a.txt", b"these are words")}, 415, "file"),
        ({"file": ("a.mp3", b"ID3\x04\x00\x00\x00\x00\x00\x00 no sound")}, 400, "file"),
        ({"file": ("a.wav", b"")}, 400, "file"),
        ({"file": ("a.wav", wav(spoken("a"))), "prompt": ("p.txt", b"x")}, 400, "prompt"),
    ],
)
def test_files_that_are_no_sound(server: Server, files: Any, status: int, param: str) -> None:
    form = files or {"other": (None, "x")}
    reply = server.http.post("/v1/audio/transcriptions", data={"model": "mini_ctc"}, files=form)
    if not files:  # a field that nobody knows is the other fault of this form
        reply = server.http.post("/v1/audio/transcriptions", files={"model": (None, "mini_ctc")})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    if status == 415:
        assert "FLAC" in reply.json()["error"]["message"]


def test_json_is_no_form(server: Server) -> None:
    reply = server.http.post("/v1/audio/transcriptions", json={"model": "mini_ctc"})
    assert reply.status_code == 415
    assert "multipart/form-data" in reply.json()["error"]["message"]


def test_a_client_that_leaves_ends_all_windows(server: Server) -> None:
    with server.http.stream(
        "POST",
        "/v1/audio/transcriptions",
        data={"model": "mini_ctc", "stream": "true"},
        files={"file": ("a.wav", wav(spoken(LONG)))},
    ) as reply:
        line = next(line for line in reply.iter_lines() if line.startswith("data: "))
        assert json.loads(line[6:])["type"] == "transcript.text.delta"
    assert not any(pool["used"] for pool in server.pools()["mini_ctc"].values())
