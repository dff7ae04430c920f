"""Kokoro, tiny and random, through a real server: formats, pieces, voices, knobs, and what is refused."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest

from mstar.spec.processor import ProcessorContext
from mstar.spec.tasks import SpeechTask
from mstar_tts.espeak import espeak
from mstar_tts.kokoro.processor import KokoroProcessor
from mstar_tts.kokoro.spec import KOKORO, KokoroKnobs, KokoroOptions
from mstar_tts.kokoro.tiny import write_kokoro

from .serving import Server, serving

pytestmark = pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed: no text can be pronounced")

RATE = 24_000
PIECES = {"first_chunk_target_phonemes": 20, "chunk_target_phonemes": 40}
TEXT = "The cat sat on the mat. It saw a bird, and the bird flew away over the hills, far from there! Was it afraid?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kokoro")
    write_kokoro(folder)
    return folder


@pytest.fixture(scope="module")
def server(weights: Path) -> Iterator[Server]:
    with serving(
        "kokoro",
        extra_plugins=("mstar_tts.plugin",),
        executor="inline",
        weights=str(weights),
        model_kwargs=PIECES,
    ) as running:
        yield running


def ask(server: Server, **body: Any) -> httpx.Response:
    request = {"model": "kokoro", "input": "Hello there.", "response_format": "pcm", "seed": 1, **body}
    return server.http.post("/v1/audio/speech", json=request)


def sound(server: Server, **body: Any) -> np.ndarray:
    response = ask(server, **body)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2")


def test_every_format_holds_the_same_sound(server: Server) -> None:
    expected = len(sound(server))
    assert expected > 500
    for name in ("wav", "flac", "mp3", "opus", "aac"):
        response = ask(server, response_format=name)
        assert response.status_code == 200, response.text
        with av.open(io.BytesIO(response.content)) as container:
            held = sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0))
        padding = {"wav": 0.0, "flac": 0.0}.get(name, 0.12)
        assert expected / RATE - 1e-6 <= held + 0.03 * bool(padding) <= expected / RATE + 0.03 + padding, name
    assert ask(server).headers["x-sample-rate"] == str(RATE)


def test_pieces_follow_each_other_without_a_gap(server: Server, weights: Path) -> None:
    """What is heard is the sound of each piece, sample for sample, streamed and whole."""
    events = ask(server, input=TEXT, stream_format="sse").text
    assert '"finish_reason":"stop"' in events.replace(" ", "")
    streamed = sound(server, input=TEXT, stream=True)
    assert np.array_equal(streamed, sound(server, input=TEXT, stream=False))
    options = KokoroOptions(**PIECES)
    processor = KokoroProcessor(ProcessorContext(KOKORO, weights, options))
    pieces = processor.pieces(SpeechTask(knobs=KokoroKnobs(), text=TEXT))
    assert len(pieces) > 2
    alone = [sound(server, phonemes=piece.knobs.phonemes, sentence_chunking=False) for piece in pieces]
    assert np.array_equal(streamed, np.concatenate(alone))
    assert len(pieces[0].knobs.phonemes) <= PIECES["first_chunk_target_phonemes"] + 5  # no break within it


def test_eight_at_once_are_what_each_is_alone(server: Server) -> None:
    texts = [
        f"Number {n} is here." if n % 2 else f"This one, number {n}, has more to say than others." for n in range(8)
    ]
    alone = [sound(server, input=text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: sound(server, input=text), texts))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)


def test_seed_speed_voice_blend_and_phonemes_are_heard(server: Server) -> None:
    plain = sound(server)
    assert np.array_equal(plain, sound(server))
    assert not np.array_equal(plain, sound(server, seed=2))
    assert len(sound(server, seed=2)) == len(plain)  # noise alone
    assert 1.5 < len(sound(server, speed=0.5)) / len(plain) < 2.5
    assert len(sound(server, speed=2.0)) < len(plain)
    bella, heart = sound(server, voice="af_bella"), sound(server, voice="af_heart")
    assert np.array_equal(heart, plain)  # the default
    blend = sound(server, voice="af_bella(2)+af_heart(1)")
    assert not np.array_equal(blend, bella)
    assert np.array_equal(blend, sound(server, voice="af_bella(4)+af_heart(2)"))
    assert not np.array_equal(blend, sound(server, voice="af_bella+af_heart"))
    assert np.array_equal(sound(server, voice="af_heart(3)"), heart)
    spoken = sound(server, input="anything", phonemes="həlˈO ðˈɛɹ.")
    assert np.array_equal(spoken, sound(server, input="[Hello](/həlˈO/) [there](/ðˈɛɹ/)."))
    assert not np.array_equal(sound(server, lang_code="b"), plain)


def test_voices_are_listed_with_language_and_gender(server: Server) -> None:
    voices = {voice["id"]: voice for voice in server.http.get("/v1/audio/voices").json()["data"]}
    assert voices.keys() == {"af_bella", "af_heart", "bm_daniel", "ff_siwis"}  # nothing pronounces Japanese here
    assert (voices["bm_daniel"]["language"], voices["bm_daniel"]["gender"]) == ("en-GB", "male")
    assert voices["ff_siwis"]["language"] == "fr-FR"
    assert len(sound(server, voice="ff_siwis", input="Bonjour tout le monde.")) > 500


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": "  \n"}, "input", "empty"),
        ({"input": "😀 👍🏽 ✨"}, "input", "nothing"),
        ({"input": "... !!! —"}, "input", "nothing"),
        ({"voice": "af_hart"}, "voice", "af_heart"),
        ({"voice": "af_heart+af_bela"}, "voice", "af_bella"),
        ({"voice": "af_heart(0)"}, "voice", "from 0.000001"),
        ({"voice": "af_heart(1e7)+af_bella"}, "voice", "to 1000000"),
        ({"voice": "af_heart(("}, "voice", "af_bella(2)+af_sky(1)"),
        ({"voice": "+".join(["af_heart"] * 9)}, "voice", "8"),
        ({"voice": "../../etc/passwd"}, "voice", "no voice"),
        ({"voice": "jf_alpha"}, "lang_code", "mstar-tts[ja]"),
        ({"lang_code": "z"}, "lang_code", "mstar-tts[zh]"),
        ({"lang_code": "xx"}, "lang_code", "known"),
        ({"speed": 0}, "speed", "0.25"),
        ({"speed": 100}, "speed", "4"),
        ({"phonemes": "漢"}, "phonemes", "nothing"),
        ({"instructions": "Whisper."}, "instructions", "not supported"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", "voice"),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_name(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    response = ask(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_long_text_is_spoken_and_one_piece_has_a_limit(server: Server) -> None:
    long = " ".join(f"Sentence number {n} is not long." for n in range(60))
    with server.http.stream(
        "POST", "/v1/audio/speech", json={"model": "kokoro", "input": long, "response_format": "pcm"}
    ) as response:
        assert response.status_code == 200
        assert len(next(response.iter_bytes())) > 0  # and the client leaves
    response = ask(server, input=long, sentence_chunking=False)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert "510" in response.json()["error"]["message"]
    server.pools()  # nobody runs any more


def test_the_native_route_has_the_voice_among_its_knobs(server: Server) -> None:
    knobs = json.dumps({"voice": "af_bella", "seed": 1})
    response = server.http.post("/generate", data={"text": "Hello there.", "model_kwargs": knobs})
    assert response.status_code == 200, response.text
    assert "audio" in response.text or response.headers["content-type"].startswith("audio")


def test_speech_that_runs_away_is_cut_and_says_so(weights: Path) -> None:
    with serving(
        "kokoro",
        extra_plugins=("mstar_tts.plugin",),
        executor="inline",
        weights=str(weights),
        model_kwargs={"max_frames_per_phoneme": 1},
    ) as server:
        text = "The cat sat on the mat and saw a bird that flew over the hills and far away from all of them."
        response = ask(server, input=text, stream=False, response_format="wav")
        assert response.headers["x-finish-reason"] == "length"
        with wave.open(io.BytesIO(response.content)) as file:
            assert file.getnframes() % 80 == 0  # whole frames
        assert ask(server, input="Hi.", stream=False, response_format="wav").headers["x-finish-reason"] == "stop"
