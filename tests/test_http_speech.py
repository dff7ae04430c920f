"""Speech through a real server, asked as OpenAI's client asks."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest

from mstar.processing.sentences import sentence_pieces
from mstar.spec.errors import RequestError
from mstar.testing.miniatures.catalog import PIECE, omni_speech, speech_answer
from mstar.testing.miniatures.processors import SpeechProcessor

from .serving import Server, serving

RATE = 8000
LONG = "One two. Three four five six seven. Eight nine ten, and eleven too."
PIECES = ["One two.", "Three four five six", "seven. Eight nine ten,", "and eleven too."]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        "mini_tts", "mini_omni", "mini_chat", extra_plugins=("mstar.testing.miniatures",), executor="inline"
    ) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: Server, **body: Any) -> httpx.Response:
    return server.http.post("/v1/audio/speech", json={"model": "mini_tts", "input": "abc", **body})


def pcm(samples: np.ndarray) -> bytes:
    return np.rint(samples * 32767).astype("<i2").tobytes()


def decoded(data: bytes) -> tuple[np.ndarray, int]:
    """float32 samples and their rate, of a file of any format."""
    with av.open(io.BytesIO(data)) as container:
        pieces = [
            av.AudioResampler("flt", "mono").resample(frame)[0].to_ndarray().reshape(-1)
            for frame in container.decode(audio=0)
        ]
        return np.concatenate(pieces), container.streams.audio[0].rate


def clip(samples: np.ndarray, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm(samples))
    return out.getvalue()


def test_pcm_is_the_sound_and_says_its_rate(client: openai.OpenAI) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="mini_tts", voice="default", input="abc", response_format="pcm"
    ) as reply:
        assert reply.read() == pcm(speech_answer("abc"))
        assert reply.headers["content-type"] == "audio/pcm;rate=8000;channels=1"
        assert (reply.headers["x-sample-rate"], reply.headers["x-audio-channels"]) == ("8000", "1")
        assert "content-length" not in reply.headers


def test_the_client_writes_a_playable_file_by_default(client: openai.OpenAI) -> None:
    """The default is MP3, and bytes are what the content type says."""
    reply = client.audio.speech.create(model="mini_tts", voice="ann", input=LONG, extra_body={"max_tokens": 200})
    samples, rate = decoded(reply.content)
    assert reply.response.headers["content-type"] == "audio/mpeg"
    assert rate == RATE == int(reply.response.headers["x-sample-rate"])
    assert len(samples) >= 4 * 800


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [
        ("mp3", "audio/mpeg", b"\xff"),
        ("opus", "audio/ogg", b"OggS"),
        ("aac", "audio/aac", b"\xff"),
        ("flac", "audio/flac", b"fLaC"),
        ("wav", "audio/wav", b"RIFF"),
    ],
)
def test_every_format_decodes_to_the_sound(server: Server, name: str, kind: str, head: bytes, stream: bool) -> None:
    reply = ask(server, input=LONG, response_format=name, stream=stream, max_tokens=200)
    assert (reply.status_code, reply.headers["content-type"]) == (200, kind)
    assert reply.content.startswith((head, b"ID3"))
    assert ("content-length" in reply.headers) == (not stream)
    samples, rate = decoded(reply.content)
    assert int(reply.headers["x-sample-rate"]) in (rate, 8000)
    expected = np.concatenate([speech_answer(piece, 200) for piece in PIECES])
    if name in ("wav", "flac"):
        np.testing.assert_allclose(samples, expected, atol=1.5 / 32767)
    else:
        assert len(samples) / rate >= len(expected) / RATE


def test_a_whole_wav_has_exact_sizes(server: Server) -> None:
    reply = ask(server, response_format="wav")
    with wave.open(io.BytesIO(reply.content)) as file:
        assert file.readframes(file.getnframes()) == pcm(speech_answer("abc"))
        assert file.getparams()[:3] == (1, 2, RATE)
    assert int.from_bytes(reply.content[4:8], "little") == len(reply.content) - 8
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert reply.headers["x-finish-reason"] == "length"


def test_a_streamed_wav_has_one_open_ended_header(server: Server) -> None:
    reply = ask(server, input=LONG, response_format="wav", stream=True)
    assert reply.content.count(b"RIFF") == 1
    assert reply.content[4:8] == reply.content[40:44] == b"\xff" * 4
    assert reply.content[44:] == pcm(np.concatenate([speech_answer(piece) for piece in PIECES]))


def test_events_end_with_usage_and_the_reason(server: Server) -> None:
    """The finish reason is reported."""
    reply = ask(server, input="abc. def", response_format="wav", stream_format="sse", max_tokens=5)
    lines = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert {line["type"] for line in lines[:-1]} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(line["audio"]) for line in lines[:-1])
    assert data[44:] == pcm(speech_answer("abc. def", 5))
    usage = {"input_tokens": 8, "output_tokens": 5, "total_tokens": 13}
    assert lines[-1] == {"type": "speech.audio.done", "usage": usage, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("chunking", "pieces"),
    [
        (None, PIECES),
        (False, [LONG]),
        (True, ["One two.", "Three four five six", "seven.", "Eight nine ten,", "and eleven too."]),
    ],
)
def test_long_texts_are_spoken_in_pieces(server: Server, chunking: bool | None, pieces: list[str]) -> None:
    """No gap between pieces."""
    reply = ask(server, input=LONG, response_format="pcm", sentence_chunking=chunking)
    assert reply.content == pcm(np.concatenate([speech_answer(piece) for piece in pieces]))
    assert server.pools()["mini_tts"]["kv"]["used"] == 0


@pytest.mark.parametrize("voice", ["ann", "bob", "chloé", "ann+bob", {"id": "bob"}])
def test_voices_and_blends(server: Server, voice: Any) -> None:
    reply = ask(server, voice=voice, response_format="pcm")
    name = voice["id"] if isinstance(voice, dict) else voice
    assert reply.content == pcm(speech_answer("abc", voice=name))


@pytest.mark.parametrize("data_url", [True, False])
def test_a_clip_gives_the_voice(server: Server, data_url: bool) -> None:
    sample = np.linspace(-1, 1, 333, dtype=np.float32)
    coded = base64.b64encode(clip(sample)).decode()
    reply = ask(
        server,
        ref_audio=f"data:audio/wav;base64,{coded}" if data_url else coded,
        ref_text="what is said",
        response_format="pcm",
    )
    assert reply.content == pcm(speech_answer("abc", sample=sample)), reply.text


@pytest.mark.parametrize("text", ["🙂🙂", "…!?", "。", "\u200b", '"', "💩" * 500])
def test_what_cannot_be_spoken_is_no_error_of_the_server(server: Server, text: str) -> None:
    assert ask(server, input=text).status_code in (200, 400)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        pytest.param({"input": ""}, "input", id="D1"),
        pytest.param({"input": " \n\t"}, "input", id="D1-blank"),
        pytest.param({"input": None}, "input", id="input-null"),
        pytest.param({"input": ["a"]}, "input", id="input-list"),
        pytest.param({"input": "x" * 32_769}, "input", id="D22"),
        pytest.param({"voice": ""}, "voice", id="D2"),
        pytest.param({"voice": "nobody"}, "voice", id="D2-unknown"),
        pytest.param({"voice": "ann+nobody"}, "voice", id="blend"),
        pytest.param({"voice": {"id": ""}}, "voice", id="voice-id"),
        pytest.param({"voice": {"name": "ann"}}, "voice.id", id="voice-object"),
        pytest.param({"voice": "../../etc/passwd"}, "voice", id="D17"),
        pytest.param({"voice": "/etc/passwd\0"}, "voice", id="D17-nul"),
        pytest.param({"voice": "%2e%2e/voice"}, "voice", id="D17-escaped"),
        pytest.param({"speed": 0}, "speed", id="D5-0"),
        pytest.param({"speed": -1}, "speed", id="D5-negative"),
        pytest.param({"speed": 100}, "speed", id="D5-100"),
        pytest.param({"speed": "fast"}, "speed", id="D5-text"),
        pytest.param({"speed": 2.0}, "speed", id="D6"),
        pytest.param({"ref_text": "hello"}, "ref_text", id="D7"),
        pytest.param({"ref_audio": "AAAA", "voice": "ann"}, "voice", id="D7-two"),
        pytest.param({"ref_audio": "AAAA"}, "ref_audio", id="clip-damaged"),
        pytest.param({"ref_audio": "???"}, "ref_audio", id="clip-base64"),
        pytest.param({"ref_audio": "file:///etc/passwd"}, "ref_audio", id="C9-file"),
        pytest.param({"ref_audio": "http://127.0.0.1/a.wav"}, "ref_audio", id="C9"),
        pytest.param({"top_k": -1}, "top_k", id="D8"),
        pytest.param({"temperature": "hot"}, "temperature", id="knob"),
        pytest.param({"max_token": 3}, "max_token", id="unknown"),
        pytest.param({"response_format": "mp4"}, "response_format", id="format"),
        pytest.param({"stream_format": "ws"}, "stream_format", id="stream-format"),
        pytest.param({"stream_format": "sse", "stream": False}, "stream", id="stream-both"),
        pytest.param({"stream": "yes"}, "stream", id="stream"),
        pytest.param({"instructions": "cheerfully"}, "instructions", id="instructions"),
        pytest.param({"model": "mini_chat"}, "model", id="E22"),
    ],
)
def test_wrong_requests_name_the_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    """A 4xx, before anything is begun."""
    reply = ask(server, **wrong)
    assert reply.status_code == (415 if wrong.get("ref_audio") == "AAAA" and "voice" not in wrong else 400), reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert ask(server, response_format="pcm").content == pcm(speech_answer("abc"))


def test_an_unknown_voice_is_told_the_nearest(server: Server) -> None:
    assert "'chloé'" in ask(server, voice="chloe").json()["error"]["message"]


def test_a_voice_that_was_uploaded_speaks(client: openai.OpenAI, server: Server) -> None:
    sample = np.linspace(-0.5, 0.5, 421, dtype=np.float32)
    made = client.audio.voices.create(name="Zoë", audio_sample=("zoe.wav", clip(sample)), consent="none")
    assert (made.name, made.object, made.type) == ("Zoë", "audio.voice", "audio_sample")
    for voice in (made.id, "Zoë"):
        reply = ask(server, input=LONG, voice=voice, response_format="pcm")
        assert reply.content == pcm(np.concatenate([speech_answer(piece, sample=sample) for piece in PIECES]))
    listed = server.http.get("/v1/audio/voices", params={"model": "mini_tts"}).json()["data"]
    assert [voice["name"] for voice in listed] == ["Ann", "Bob", "Chloé", "Zoë"]
    assert listed[-1]["models"] == ["mini_tts"]
    assert server.http.delete(f"/v1/audio/voices/{made.id}").json()["deleted"] is True
    assert ask(server, voice="Zoë").status_code == 400
    assert [model["id"] for model in server.http.get("/v1/audio/models").json()["data"]] == ["mini_tts", "mini_omni"]


@pytest.mark.parametrize("requests", [1, 8])
def test_pieces_keep_their_order_however_many_fit(requests: int) -> None:
    """Four listeners of many pieces each, where one request runs at a time and where eight do."""
    text = " ".join(f"{LONG} {number}." for number in range(6))
    expected = pcm(np.concatenate([speech_answer(piece) for piece in sentence_pieces(text, PIECE, first=PIECE // 2)]))
    with (
        serving(
            "mini_tts",
            extra_plugins=("mstar.testing.miniatures",),
            executor="inline",
            max_concurrent_requests=requests,
        ) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        replies = list(pool.map(lambda _: ask(running, input=text, response_format="pcm"), range(4)))
        assert [reply.content == expected for reply in replies] == 4 * [True]
        assert running.pools()["mini_tts"]["kv"]["used"] == 0


@pytest.mark.parametrize("failing", [1, 2])
def test_a_piece_that_cannot_be_made_ends_the_answer_where_it_would_begin(
    server: Server, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused while the first one is heard; what comes before it is heard to its end, what comes behind ends."""
    prepare = SpeechProcessor.prepare

    def refuse(self: SpeechProcessor, task: Any, request_id: str) -> Any:
        if task.text == PIECES[failing]:
            raise RequestError("this cannot be said", param="input")
        return prepare(self, task, request_id)

    monkeypatch.setattr(SpeechProcessor, "prepare", refuse)
    events = ask(server, input=LONG, response_format="pcm", stream_format="sse", max_tokens=100).text.splitlines()
    *sounds, last = [json.loads(line.removeprefix("data: ")) for line in events if line]
    said = b"".join(base64.b64decode(sound["audio"]) for sound in sounds)
    assert said == pcm(np.concatenate([speech_answer(piece, 100) for piece in PIECES[:failing]]))
    assert (last["type"], last["error"]["message"]) == ("error", "this cannot be said")
    assert server.pools()["mini_tts"]["kv"]["used"] == 0


def test_a_cancel_ends_the_pieces_that_are_made_ahead(server: Server) -> None:
    body = {"model": "mini_tts", "input": LONG * 100, "max_tokens": 200, "stream_format": "sse"}
    asked = {"X-Request-ID": "long"}
    with server.http.stream("POST", "/v1/audio/speech", json=body, headers=asked) as reply:
        lines = reply.iter_lines()
        assert "speech.audio.delta" in next(line for line in lines if line)
        assert server.http.delete("/v1/requests/long").status_code == 200
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["finish_reason"] == "cancelled"
    assert server.pools()["mini_tts"]["kv"]["used"] == 0


def test_a_client_that_leaves_ends_its_pieces(server: Server) -> None:
    body = {"model": "mini_tts", "input": LONG * 200, "max_tokens": 200, "response_format": "pcm"}
    with server.http.stream("POST", "/v1/audio/speech", json=body) as reply:
        assert reply.status_code == 200
        next(reply.iter_raw())
    assert server.pools()["mini_tts"]["kv"]["used"] == 0


def test_more_requests_than_fit_wait_or_are_told(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: ask(server, input=LONG, response_format="pcm"), range(24)))
    expected = pcm(np.concatenate([speech_answer(piece) for piece in PIECES]))
    assert all(reply.status_code in (200, 429, 503) for reply in replies)
    assert all(reply.content == expected for reply in replies if reply.status_code == 200)
    assert sum(reply.status_code == 200 for reply in replies) >= 12


# --- chats that are heard ---------------------------------------------------------------------------------------------


def said(text: str, **audio: Any) -> dict[str, Any]:
    return {
        "model": "mini_omni",
        "messages": [{"role": "user", "content": text}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "default", **audio},
        "max_tokens": 9,
    }


def test_a_chat_answers_with_sound(client: openai.OpenAI) -> None:
    text, sound = omni_speech("abc", 9, "ann")
    reply = client.chat.completions.create(**said("abc", voice="ann", format="wav"))
    message = reply.choices[0].message
    assert message.content is None
    assert message.audio is not None
    assert message.audio.transcript == text
    assert message.audio.expires_at == reply.created
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert file.readframes(file.getnframes()) == pcm(sound)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 3


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", ["wav", "pcm16", "mp3"])
def test_a_streamed_chat_has_one_header_a_choice(client: openai.OpenAI, name: str, n: int) -> None:
    text, sound = omni_speech("abc", 9)
    data, words = dict.fromkeys(range(n), b""), dict.fromkeys(range(n), "")
    ids, rates = set(), []
    for chunk in client.chat.completions.create(**said("abc", format=name), n=n, stream=True):
        for choice in chunk.choices:
            heard = {} if choice.delta.audio is None else choice.delta.audio.to_dict()
            data[choice.index] += base64.b64decode(heard.get("data", ""))
            words[choice.index] += heard.get("transcript", "")
            ids |= {heard["id"]} if "id" in heard else set()
            rates += [heard["sample_rate"]] if "sample_rate" in heard else []
    assert (set(words.values()), len(ids), rates) == ({text}, n, [8000] * n)
    for file in data.values():
        if name == "mp3":
            assert decoded(file)[1] == 8000
        else:
            assert file.count(b"RIFF") == (name == "wav")
            assert file[44 if name == "wav" else 0 :] == pcm(sound)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"modalities": ["text"]}, "audio"),
        ({"modalities": ["text", "video"]}, "modalities"),
        ({"audio": None}, "audio"),
        ({"audio": {"voice": "ann"}}, "audio.format"),
        ({"audio": {"voice": "ann", "format": "pcm"}}, "audio.format"),
        ({"audio": {"voice": "nobody", "format": "wav"}}, "audio.voice"),
        ({"audio": {"voice": "", "format": "wav"}}, "audio.voice"),
        ({"model": "mini_chat"}, "modalities"),
        ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].content"),
    ],
)
def test_wrong_chats_with_sound_name_the_field(server: Server, wrong: dict[str, Any], param: str) -> None:
    reply = server.http.post("/v1/chat/completions", json={**said("abc", format="wav"), **wrong})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
