"""Memory stays flat over many requests of a kind that each make something new."""

from __future__ import annotations

import base64
import gc
import io
import random
import wave
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from PIL import Image

from .serving import Server, serving

WARM, MANY, MOST_BYTES = 40, 300, 24 << 20
"""Requests before the first look, between the two looks, and what may have been added to them in all: less than what
each request handles, times *MANY*."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("mini_tts", "mini_denoise", extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def grown(server: Server, ask: Callable[[int], None]) -> int:
    """Bytes by which the server, which runs here, and its decoders grow over *MANY* requests."""

    def held() -> int:
        assert not any(pool["used"] for pools in server.pools().values() for pool in pools.values())
        gc.collect()
        process = psutil.Process()
        return sum(p.memory_info().rss for p in (process, *process.children()))

    for number in range(WARM):
        ask(number)
    before = held()
    for number in range(WARM, WARM + MANY):
        ask(number)
    return held() - before


def test_mixes_and_samples_of_voices(server: Server) -> None:
    """No two alike."""
    draw = np.random.default_rng(1)

    def ask(number: int) -> None:
        body = {"model": "mini_tts", "input": "abc", "response_format": "wav"}
        mix = "+".join(draw.choice(("ann", "bob"), draw.integers(1, 6)))
        samples = draw.integers(-9000, 9000, 48_000).astype("<i2").tobytes()
        assert len(samples) > MOST_BYTES / MANY, "else a leak of it would not show"
        for voice in ({"voice": mix}, {"ref_audio": base64.b64encode(wav(samples)).decode()}):
            reply = server.http.post("/v1/audio/speech", json={**body, **voice})
            assert reply.status_code == 200, reply.text

    assert grown(server, ask) < MOST_BYTES


def wav(samples: bytes) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples)
    return out.getvalue()


def test_edits_of_random_sizes(server: Server) -> None:
    draw = random.Random(2)

    def ask(number: int) -> None:
        width, height = draw.randint(200, 400), draw.randint(200, 400)
        out = io.BytesIO()
        Image.fromarray(np.full((height, width, 3), number % 256, np.uint8)).save(out, "PNG")
        fields = {"model": "mini_denoise", "prompt": "abc", "size": "6x4"}
        reply = server.http.post("/v1/images/edits", data=fields, files={"image": ("a.png", out.getvalue())})
        assert reply.status_code == 200, reply.text
        assert width * height * 3 > MOST_BYTES / MANY, "else a leak of it would not show"

    assert grown(server, ask) < MOST_BYTES
