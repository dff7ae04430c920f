"""Qwen3-ASR through a real server, with a tiny random checkpoint: clips, and speech that goes on."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from websockets.sync.client import connect

from mstar_asr.qwen3_asr.tiny import tones, write

from .serving import Server, serving

# OpenAI's client opens its socket in a way that its library would like to see changed
pytestmark = pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")

TRANSCRIPT = "conversation.item.input_audio_transcription"
KEY = "qwen3_asr_realtime"
RATE = 16_000


def plugins() -> tuple[str, ...]:
    """The package's, unless it is installed."""
    names = {entry.value for entry in importlib.metadata.entry_points(group="mstar.plugins")}
    return () if "mstar_asr.plugin" in names else ("mstar_asr.plugin",)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("qwen3")
    write(folder)
    options = {"live_seconds": 60, "live_max_tokens": 16, "default_max_tokens": 40}
    with serving(
        KEY, extra_plugins=plugins(), executor="inline", weights=str(folder), dtype="float32", model_kwargs=options,
        max_concurrent_requests=8,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wav(samples: np.ndarray[Any, Any]) -> tuple[str, bytes]:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV", subtype="FLOAT")
    return "clip.wav", out.getvalue()


def pcm(samples: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.rint(samples * 32767).astype("<i2").tobytes()).decode()


def idle(server: Server) -> bool:
    return not any(pool["used"] for pool in server.pools()[KEY].values())


CLIP = tones(random.Random(3), 9.3)
LIVE = np.repeat(tones(random.Random(5), 11.0), 3)[::2]  # at 24 kHz, more or less


def test_every_format_has_the_same_words(client: openai.OpenAI, server: Server) -> None:
    transcribe = client.audio.transcriptions.create
    asked: dict[str, Any] = {"model": KEY, "language": "de", "prompt": "Namen: Ada"}
    text = transcribe(file=wav(CLIP), **asked).text
    assert text
    assert transcribe(file=wav(CLIP), response_format="text", **asked) == text + "\n"
    verbose = transcribe(file=wav(CLIP), response_format="verbose_json", **asked)
    (segment,) = verbose.segments or ()
    assert (verbose.text, verbose.language, segment.text, segment.end) == (text, "german", text, 9.3)
    assert f"00:00:00,000 --> 00:00:09,300\n{text}\n" in transcribe(file=wav(CLIP), response_format="srt", **asked)
    events = list(transcribe(file=wav(CLIP), stream=True, **asked))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1].text == text  # type: ignore[union-attr]
    reported = transcribe(file=wav(CLIP), include=["logprobs"], **asked)
    assert reported.text == text
    assert reported.logprobs
    assert all(entry.logprob is not None and entry.logprob <= 0 for entry in reported.logprobs)
    assert transcribe(file=wav(CLIP), **{**asked, "prompt": "other words"}).text != text
    assert idle(server)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"language": "Germn"}, "language", "did you mean 'German'"),
        ({"language": "xx"}, "language", "'xx'"),
        ({"temperature": 3}, "temperature", "nearest valid value is 2"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "word"}, "timestamp_granularities", "word"),
        ({"max_tokens": 99999}, "max_tokens", "32768"),
    ],
)
def test_bad_fields_are_named(server: Server, fields: dict[str, Any], param: str, told: str) -> None:
    answer = server.http.post(
        "/v1/audio/transcriptions", data={"model": KEY, **fields}, files={"file": wav(CLIP[:RATE])}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert told in answer.json()["error"]["message"]


def test_the_native_route_takes_a_clip_too(client: openai.OpenAI, server: Server) -> None:
    text = client.audio.transcriptions.create(model=KEY, file=wav(CLIP), language="en").text
    body = {"model": KEY, "model_kwargs": json.dumps({"language": "en"})}
    answer = server.http.post("/generate", data=body, files={"files": wav(CLIP)})
    assert answer.status_code == 200, answer.text
    outputs = answer.json()["outputs"]
    assert outputs["text"][0]["text"] == text
    assert outputs["segment"][0]["language"] == "en"
    missing = server.http.post("/generate", data=body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "files")


def test_speech_is_written_down_while_it_goes_on(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model=KEY) as talk:
        talk.session.update(
            session={
                "type": "transcription",
                "audio": {"input": {"turn_detection": None, "transcription": {"model": KEY, "language": "en"}}},
            }
        )
        for start in range(0, len(LIVE), 7_000):
            talk.input_audio_buffer.append(audio=pcm(LIVE[start : start + 7_000]))
        deltas, kinds = [], []
        for event in talk:
            assert event.type not in ("error", f"{TRANSCRIPT}.failed"), event
            kinds.append(event.type)
            if event.type == f"{TRANSCRIPT}.delta":
                deltas.append(event.delta)
                if "input_audio_buffer.committed" not in kinds and len(deltas) == 1:
                    talk.input_audio_buffer.commit()  # words have come before the turn was over
            elif event.type == f"{TRANSCRIPT}.completed":
                assert event.transcript == "".join(deltas) != ""
                assert event.usage.seconds == pytest.approx(len(LIVE) / 24_000, abs=1e-3)
                break
    assert kinds.index(f"{TRANSCRIPT}.delta") < kinds.index("input_audio_buffer.committed")
    assert idle(server)


def test_a_client_that_leaves_leaves_nothing(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model=KEY) as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        talk.input_audio_buffer.append(audio=pcm(LIVE[:200_000]))
        for event in talk:
            if event.type == "session.updated":
                break
    assert idle(server)


def test_turns_are_found_and_each_is_a_transcript(client: openai.OpenAI, server: Server) -> None:
    quiet, loud = np.zeros(24_000, np.float32), LIVE[:60_000]
    said: dict[str, str] = {}
    with client.realtime.connect(model=KEY) as talk:
        language = {"model": KEY, "language": "German"}
        talk.session.update(session={"type": "transcription", "audio": {"input": {"transcription": language}}})
        for samples in (quiet, loud, quiet, loud, quiet):
            for start in range(0, len(samples), 2_400):
                talk.input_audio_buffer.append(audio=pcm(samples[start : start + 2_400]))
        for event in talk:
            assert event.type not in ("error", f"{TRANSCRIPT}.failed"), event
            if event.type == f"{TRANSCRIPT}.completed":
                said[event.item_id] = event.transcript
                if len(said) == 2:
                    break
    assert all(said.values())
    assert idle(server)


def test_a_session_says_what_is_wrong_and_goes_on(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model=KEY) as talk:
        wish = {"model": KEY, "language": "Klingon"}
        talk.session.update(
            session={"type": "transcription", "audio": {"input": {"turn_detection": None, "transcription": wish}}}
        )
        talk.input_audio_buffer.append(audio=pcm(LIVE[:4_800]))
        for event in talk:
            if event.type == "error":
                assert event.error.param == "session.audio.input.transcription.language"
                assert "Klingon" in event.error.message
                break
    assert idle(server)


def test_the_native_socket_feeds_speech_too(server: Server) -> None:
    samples = tones(random.Random(8), 8.5)
    opening = {"id": "a", "model": KEY, "live": ["audio"], "model_kwargs": {"language": "en"}}
    with connect(server.url.replace("http", "ws") + "/generate/ws") as socket:
        socket.send(json.dumps(opening))
        for start in range(0, len(samples), 8_000):
            items = [round(float(sample), 5) for sample in samples[start : start + 8_000]]
            socket.send(json.dumps({"id": "a", "append": {"audio": items}}))
        told = [json.loads(socket.recv(timeout=60))]
        assert (told[0]["type"], told[0]["modality"]) == ("delta", "text"), told
        socket.send(json.dumps({"id": "a", "end_input": True}))
        while told[-1]["type"] == "delta":
            told.append(json.loads(socket.recv(timeout=60)))
        assert told[-1]["type"] == "done", told[-1]
        text = "".join(event["text"] for event in told if event.get("modality") == "text")
        (segment,) = (event for event in told if event.get("modality") == "segment")
        assert segment["text"] == text
        socket.send(json.dumps({**opening, "id": "b"}))
        socket.send(json.dumps({"id": "b", "append": {"audio": items}}))
        socket.send(json.dumps({"id": "b", "cancel": True}))
        assert json.loads(socket.recv(timeout=60))["finish_reason"] == "cancelled"
    assert idle(server)
