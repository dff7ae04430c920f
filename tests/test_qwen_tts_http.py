"""Qwen3-TTS, tiny and random, through a real server: speakers, designed and cloned voices, pieces, refusals."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from mstar.spec.sound import wav
from mstar_tts.qwen3_tts import tiny

from .serving import Server, serving

FRAME = 1920


class Speaking:
    """A server of one model."""

    def __init__(self, key: str, server: Server):
        self.key, self.http, self.pools = key, server.http, server.pools


Serve = Callable[[str], Speaking]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server of one key, the same one for the same key."""
    running: dict[str, Speaking] = {}
    with ExitStack() as stack:

        def served(key: str) -> Speaking:
            if key not in running:
                folder = tmp_path_factory.mktemp(key)
                getattr(tiny, f"write_{key}")(folder)
                server = serving(
                    key,
                    extra_plugins=("mstar_tts.plugin",),
                    executor="inline",
                    weights=str(folder),
                    model_kwargs={"chunk_from_chars": 60, "chunk_chars": 40},
                    resources={"kv": {"tokens": 16_384}},
                )
                running[key] = Speaking(key, stack.enter_context(server))
            return running[key]

        yield served


def ask(server: Speaking, **body: Any) -> httpx.Response:
    request = {"input": "Hello there.", "response_format": "pcm", "seed": 1, "max_new_tokens": 6, **body}
    return server.http.post("/v1/audio/speech", json={"model": server.key, **request})


def sound(server: Speaking, **body: Any) -> np.ndarray:
    response = ask(server, **body)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2")


def close(one: np.ndarray, other: np.ndarray) -> bool:
    """The same but for what the company of other requests does to rounding."""
    return len(one) == len(other) and bool(np.abs(one.astype(int) - other).max() <= 2)


def clip(seed: int = 0, seconds: float = 0.6, rate: int = 24_000) -> str:
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * rate)).astype(np.float32)
    return base64.b64encode(wav(samples, rate)).decode()


# --- speakers -------------------------------------------------------------------------------------------------------


def test_a_text_is_spoken_whole_and_streamed(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    whole = sound(server, stream=False, max_new_tokens=12, ignore_eos=True)
    assert len(whole) == 11 * FRAME
    assert np.abs(whole).max() > 100
    assert np.array_equal(whole, sound(server, stream=True, max_new_tokens=12, ignore_eos=True))
    events = ask(server, stream_format="sse", max_new_tokens=12, ignore_eos=True).text.splitlines()
    said = [json.loads(line[6:]) for line in events if line.startswith("data: ")]
    assert said[-1]["type"] == "speech.audio.done"
    assert said[-1]["finish_reason"] == "length"
    assert said[-1]["usage"]["input_tokens"] > 5
    assert b"".join(base64.b64decode(one["audio"]) for one in said[:-1]) == whole.tobytes()


def test_what_a_request_says_is_heard(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    plain = sound(server)
    assert np.array_equal(plain, sound(server, voice="vivian"))
    assert np.array_equal(plain, sound(server, voice="VIVIAN", language="auto"))
    assert np.array_equal(plain, sound(server, instructions=None, non_streaming_mode=True))
    changed = {
        "voice": "ryan",
        "language": "de",
        "instructions": "Very happy.",
        "non_streaming_mode": False,
        "seed": 2,
        "temperature": 0.2,
        "top_k": 1,
        "subtalker_temperature": 0.1,
        "subtalker_top_k": 1,
        "subtalker_dosample": False,
        "do_sample": False,
    }
    heard = {name: sound(server, **{name: value}) for name, value in changed.items()}
    for name, other in heard.items():
        assert not np.array_equal(plain, other), name
    assert np.array_equal(heard["subtalker_top_k"], heard["subtalker_dosample"])
    assert np.array_equal(sound(server, language="German"), heard["language"])
    assert np.array_equal(sound(server, instruct="Very happy."), heard["instructions"])
    assert np.array_equal(sound(server, voice="dylan"), sound(server, voice="dylan", language="zh"))  # the dialect's


def test_the_small_model_pays_no_heed_to_instructions(serve: Serve) -> None:
    server = serve("qwen3_tts")
    assert np.array_equal(sound(server), sound(server, instructions="Very happy."))


def test_eight_at_once_are_what_each_is_alone(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    bodies: list[dict[str, Any]] = [
        {"input": "Number one." if n % 2 else "This one has more to say.", "seed": n, "max_new_tokens": 5 + n}
        for n in range(8)
    ]
    alone = [sound(server, **body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: sound(server, **body), bodies))
    for one, other in zip(alone, together, strict=True):
        assert close(one, other)


def test_long_texts_are_spoken_in_pieces(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    pieces = ["The cat sat on the mat and saw a bird.", "It flew away, over the hills!", "Was it afraid?"]
    spoken = sound(server, input=" ".join(pieces))
    assert close(spoken, np.concatenate([sound(server, input=piece) for piece in pieces]))
    assert len(sound(server, input=" ".join(pieces), sentence_chunking=False)) < len(spoken)


def test_a_client_that_leaves_frees_everything(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    body = {"model": server.key, "input": "On and on.", "response_format": "pcm", "ignore_eos": True}
    with server.http.stream("POST", "/v1/audio/speech", json=body) as response:
        assert response.status_code == 200
        assert len(next(response.iter_bytes())) > 0
    server.pools()  # nobody runs any more
    assert len(sound(server)) > 0


def test_voices_are_listed(serve: Serve) -> None:
    listed = serve("qwen3_tts_1p7b").http.get("/v1/audio/voices").json()["data"]
    voices = {voice["id"]: voice for voice in listed}
    assert voices.keys() == {"vivian", "ryan", "dylan"}
    assert "beijing" in voices["dylan"]["description"]
    assert serve("qwen3_tts_base").http.get("/v1/audio/voices").json()["data"] == []


def test_the_native_route_has_voice_and_instruction_among_its_knobs(serve: Serve) -> None:
    server = serve("qwen3_tts_1p7b")
    knobs = {"voice": "ryan", "instruct": "Sad.", "seed": 1, "max_new_tokens": 6}
    body = {"model": server.key, "text": "Hello there.", "model_kwargs": knobs}
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    wrong = server.http.post("/generate", json={**body, "model_kwargs": {**knobs, "voice": "rian"}})
    assert wrong.status_code == 400
    assert "ryan" in wrong.json()["error"]["message"]


# --- designed and cloned voices -------------------------------------------------------------------------------------


def test_a_voice_is_designed(serve: Serve) -> None:
    server = serve("qwen3_tts_voicedesign")
    low, high = (sound(server, instructions=words) for words in ("A low voice.", "A child."))
    assert not np.array_equal(low, high)
    assert np.array_equal(low, sound(server, instruct="A low voice."))


def test_a_voice_is_cloned(serve: Serve) -> None:
    server = serve("qwen3_tts_base")
    one = {"ref_audio": clip(), "ref_text": "so it goes"}
    cloned = sound(server, **one)
    assert np.array_equal(cloned, sound(server, **one))  # of what was kept
    timbre = sound(server, ref_audio=clip(), x_vector_only_mode=True)
    others = [
        sound(server, **{**one, "ref_audio": clip(1)}),
        sound(server, **{**one, "ref_text": "so they go"}),
        timbre,
    ]
    assert all(not np.array_equal(cloned, other) for other in others)
    whole = sound(server, **one, non_streaming_mode=True)
    assert not np.array_equal(whole, cloned)
    long = {"input": "The cat sat on the mat and saw a bird. It flew away, over the hills.", **one}
    assert len(sound(server, **long)) > 2 * FRAME


def test_an_uploaded_voice_is_spoken_with(serve: Serve) -> None:
    server = serve("qwen3_tts_base")
    file = {"audio_sample": ("mine.wav", base64.b64decode(clip(3)), "audio/wav")}
    made = server.http.post("/v1/audio/voices", data={"name": "mine", "text": "so it goes"}, files=file)
    assert made.status_code == 200, made.text
    uploaded = sound(server, voice="mine")
    assert len(uploaded) == len(sound(server, ref_audio=clip(3), ref_text="so it goes"))
    silent = server.http.post("/v1/audio/voices", data={"name": "silent"}, files=file)
    assert silent.status_code == 200, silent.text
    refused = ask(server, voice="silent")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ref_text")
    assert len(sound(server, voice="silent", x_vector_only_mode=True)) > 0


# --- what is refused ------------------------------------------------------------------------------------------------

CLIP = clip()


@pytest.mark.parametrize(
    ("key", "body", "param", "words"),
    [
        ("qwen3_tts_1p7b", {"input": " \n"}, "input", "empty"),
        ("qwen3_tts_1p7b", {"input": "... !"}, "input", "nothing"),
        ("qwen3_tts_1p7b", {"voice": "vivien"}, "voice", "vivian"),
        ("qwen3_tts_1p7b", {"language": "Germann"}, "language", "German"),
        ("qwen3_tts_1p7b", {"language": "pl"}, "language", "chinese"),
        ("qwen3_tts_1p7b", {"language": "beijing_dialect"}, "language", "chinese"),
        ("qwen3_tts_1p7b", {"temperature": -1}, "temperature", "0"),
        ("qwen3_tts_1p7b", {"subtalker_top_p": 0}, "subtalker_top_p", "above 0"),
        ("qwen3_tts_1p7b", {"max_new_tokens": 1}, "max_new_tokens", "2"),
        ("qwen3_tts_1p7b", {"non_streaming_mode": "yes"}, "non_streaming_mode", "true or false"),
        ("qwen3_tts_1p7b", {"instruct": "Sad.", "instructions": "Glad."}, "instruct", "one of them"),
        ("qwen3_tts_1p7b", {"ref_audio": CLIP}, "ref_audio", "cannot speak with the voice of a clip"),
        ("qwen3_tts_1p7b", {"x_vector_only_mode": True}, "x_vector_only_mode", "unknown"),
        ("qwen3_tts_1p7b", {"speed": 2}, "speed", "1"),
        ("qwen3_tts_1p7b", {"input": "so it goes. " * 2000, "sentence_chunking": False}, "input", "4096"),
        (
            "qwen3_tts_1p7b",
            {"input": "so it goes. " * 400, "sentence_chunking": False, "non_streaming_mode": False},
            "input",
            "non_streaming_mode",
        ),
        ("qwen3_tts_voicedesign", {}, "instructions", "missing"),
        ("qwen3_tts_voicedesign", {"instructions": "low", "voice": "vivian"}, "voice", "no voice"),
        ("qwen3_tts_base", {}, "ref_audio", "missing"),
        ("qwen3_tts_base", {"ref_audio": CLIP}, "ref_text", "x_vector_only_mode"),
        (
            "qwen3_tts_base",
            {"ref_audio": CLIP, "ref_text": "a", "instructions": "Sad."},
            "instructions",
            "leave it out",
        ),
        ("qwen3_tts_base", {"ref_audio": clip(seconds=0.1), "ref_text": "a"}, "ref_audio", "0.5"),
        (
            "qwen3_tts_base",
            {"voice": "vivian"},
            "voice",
            "upload it, or send its clip as 'ref_audio'",
        ),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_name(
    serve: Serve, key: str, body: dict[str, Any], param: str, words: str
) -> None:
    response = ask(serve(key), **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"], error


def test_files_say_how_long_they_are(serve: Serve) -> None:
    response = ask(serve("qwen3_tts_1p7b"), response_format="wav", ignore_eos=True)
    assert response.headers["x-finish-reason"] == "length"
    with wave.open(io.BytesIO(response.content)) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, 5 * FRAME)
