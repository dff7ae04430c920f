"""Orpheus, tiny and random, through a real server: streams, pieces, voices, knobs, ends, and what is refused."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mstar.spec.processor import ProcessorContext
from mstar.spec.tasks import SpeechTask
from mstar_tts.orpheus.processor import OrpheusProcessor
from mstar_tts.orpheus.spec import ORPHEUS, VOICES, OrpheusKnobs, OrpheusOptions
from mstar_tts.orpheus.tiny import write_orpheus

from .serving import Server, serving

RATE, FRAME, SAMPLES = 24_000, 7, 2048
PIECES = {"longest_piece": 60}
TEXT = "The cat sat on the mat. It saw a bird <laugh>, and the bird flew away over the hills, far from here! Was it?"
LONG = {"min_tokens": 42, "max_tokens": 84}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orpheus")
    write_orpheus(folder)
    return folder


def started(weights: Path, **options: Any) -> Any:
    return serving(
        "orpheus",
        extra_plugins=("mstar_tts.plugin",),
        accept_licences=("orpheus",),
        executor="inline",
        weights=str(weights),
        model_kwargs=options,
    )


@pytest.fixture(scope="module")
def server(weights: Path) -> Iterator[Server]:
    with started(weights, **PIECES) as running:
        yield running


@pytest.fixture(scope="module")
def processor(weights: Path) -> OrpheusProcessor:
    return OrpheusProcessor(ProcessorContext(ORPHEUS, weights, OrpheusOptions(**PIECES)))


def ask(server: Server, **body: Any) -> httpx.Response:
    request = {"model": "orpheus", "input": "Hello there.", "response_format": "pcm", "seed": 1, **body}
    return server.http.post("/v1/audio/speech", json=request)


def sound(server: Server, **body: Any) -> np.ndarray:
    response = ask(server, **{**LONG, **body})
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2")


def test_streamed_and_whole_in_every_way_it_is_the_same_sound(server: Server) -> None:
    streamed = sound(server, stream=True)
    assert len(streamed) >= 6 * SAMPLES
    assert len(streamed) % SAMPLES == 0
    assert np.array_equal(streamed, sound(server, stream=False))
    response = ask(server, response_format="wav", **LONG)
    with wave.open(io.BytesIO(response.content)) as file:
        assert file.getframerate() == RATE
        assert np.array_equal(np.frombuffer(file.readframes(file.getnframes()), "<i2"), streamed)
    response = ask(server, response_format="wav", stream=True, **LONG)
    assert response.content[:4] == b"RIFF"
    assert np.array_equal(np.frombuffer(response.content[44:], "<i2"), streamed)


@pytest.mark.parametrize("form", ["pcm", "wav", "mp3"])
def test_an_answer_that_ends_within_its_first_frame_is_silence(server: Server, form: str) -> None:
    response = ask(server, response_format=form, max_tokens=3, ignore_eos=True)
    assert response.status_code == 200, response.text
    if form == "pcm":
        assert response.content == bytes(2 * SAMPLES)
    elif form == "wav":
        with wave.open(io.BytesIO(response.content)) as file:
            assert (file.getframerate(), file.readframes(file.getnframes())) == (RATE, bytes(2 * SAMPLES))
    assert len(response.content) > 100
    events = ask(server, stream_format="sse", max_tokens=3, ignore_eos=True).text
    assert '"finish_reason":"length"' in events.replace(" ", "")


def test_eight_at_once_are_what_each_is_alone(server: Server) -> None:
    """Noise, draws and windows are each request's own, whoever shares its steps."""
    bodies = [{"input": f"Number {n}.", "seed": n, "voice": VOICES[n], **LONG} for n in range(8)]
    alone = [sound(server, **body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: sound(server, **body), bodies))
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other)
        assert np.abs(one.astype(int) - other).max() <= 1


def test_knobs_are_heard(server: Server) -> None:
    plain = sound(server)
    assert np.array_equal(plain, sound(server, voice="tara"))
    for change in ({"voice": "leo"}, {"seed": 2}, {"temperature": 2.0}, {"top_p": 0.1}):
        other = sound(server, **change)
        assert len(other) != len(plain) or not np.array_equal(other, plain), change
    repeated = [sound(server, ignore_eos=True, max_tokens=210, repetition_penalty=p) for p in (1.1, 10)]
    assert not np.array_equal(*repeated)
    assert len(sound(server, max_tokens=49, ignore_eos=True, min_tokens=0)) == 7 * SAMPLES


def test_pieces_follow_each_other(server: Server, processor: OrpheusProcessor) -> None:
    pieces = processor.pieces(SpeechTask(knobs=OrpheusKnobs(), text=TEXT))
    assert len(pieces) > 2
    assert all(len(piece.text) <= PIECES["longest_piece"] for piece in pieces)
    alone = [sound(server, input=piece.text) for piece in pieces]
    whole, joined = sound(server, input=TEXT), np.concatenate(alone)
    assert len(whole) == len(joined)
    # two pieces are spoken at once: a batch may round another way
    assert np.abs(whole.astype(int) - joined.astype(int)).max() <= 1


def test_the_prompt_is_the_references(weights: Path, processor: OrpheusProcessor) -> None:
    task = SpeechTask(knobs=OrpheusKnobs(), text="Hello <|eot_id|> <custom_token_2>!", voice="leo")
    ids = processor.prepare(task, "r").request.inputs["prompt"].tolist()
    tokens, encode = processor.tokens, processor.tokenizer.encode
    begin, end = encode("")[0], processor.tokenizer.id_of("<|eot_id|>")
    assert ids[:2] == [tokens.custom + 3, begin]
    assert ids[-4:] == [end, tokens.custom + 4, tokens.custom + 5, tokens.custom + 1]
    assert not {end, tokens.custom + 2} & set(ids[2:-4])  # what the client wrote begins and ends nothing
    plain = SpeechTask(knobs=OrpheusKnobs(), text="Hello there.", voice="leo")
    ids = processor.prepare(plain, "r").request.inputs["prompt"].tolist()
    assert ids[1:-4] == encode("leo: Hello there.")


def test_the_published_vocabulary() -> None:
    from mstar_tts.orpheus.tokens import OrpheusTokens

    tokens = OrpheusTokens.read({}, 4096)
    assert (tokens.start_of_human, tokens.end_of_speech) == (128_259, 128_258)
    assert tokens.before_speech == (128_260, 128_261, 128_257)
    assert tokens.ranges[0] == (128_266, 132_362)
    assert tokens.end == 156_938 <= 156_940


def test_speech_that_runs_away_is_cut_and_says_so(weights: Path, processor: OrpheusProcessor) -> None:
    limit = processor.prepare(SpeechTask(knobs=OrpheusKnobs(), text="a" * 10 + "1" * 2), "r")
    assert limit.request.sampling["sampler"].max_tokens == 336 + 12 * (12 + 2 * 5)
    with started(weights, tokens_per_character=1) as server:
        response = ask(server, input="Hi.", stream=False, response_format="wav", min_tokens=400)
        assert response.headers["x-finish-reason"] == "length"
        response = ask(server, input="Hi.", stream=False, response_format="wav", min_tokens=42)
        assert response.headers["x-finish-reason"] == "stop"


def test_a_client_that_leaves_frees_everything(server: Server) -> None:
    body = {"model": "orpheus", "input": TEXT, "response_format": "pcm", "ignore_eos": True, "max_tokens": 4000}
    with server.http.stream("POST", "/v1/audio/speech", json=body) as response:
        assert response.status_code == 200
        assert len(next(response.iter_bytes())) > 0
    pools = server.pools()["orpheus"]
    assert all(usage["used"] == 0 for usage in pools.values()), pools


def test_windows_may_be_others(weights: Path, server: Server) -> None:
    """Longer windows that fade into each other sound nearly the same, and last as long."""
    plain = sound(server).astype(float)
    with started(weights, left_frames=2, ahead_frames=3, chunk_frames=[1, 2, 4], overlap_ms=5.0) as other:
        changed = sound(other).astype(float)
        assert other.http.get("/health/ready").status_code == 200
    assert len(changed) == len(plain)
    apart = np.linalg.norm(changed - plain) / np.linalg.norm(plain)
    assert 0 < apart < 0.05


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": "... !!! —"}, "input", "nothing"),
        ({"voice": "tarra"}, "voice", "tara"),
        ({"repetition_penalty": 1.0}, "repetition_penalty", "1.1"),
        ({"temperature": -1}, "temperature", "0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 100_000}, "max_tokens", "8192"),
        ({"speed": 2}, "speed", "not supported"),
        ({"instructions": "Whisper."}, "instructions", "not supported"),
        ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", "voice"),
        ({"pitch": 2}, "pitch", "unknown"),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_name(server: Server, body: dict[str, Any], param: str, words: str) -> None:
    response = ask(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_voices_and_the_native_route(server: Server) -> None:
    assert [voice["id"] for voice in server.http.get("/v1/audio/voices").json()["data"]] == list(VOICES)
    for voice, status in (("zoe", 200), ("nobody", 400)):
        knobs = json.dumps({"voice": voice, "seed": 1, **LONG})
        response = server.http.post("/generate", data={"text": "Hello there.", "model_kwargs": knobs})
        assert response.status_code == status, response.text
