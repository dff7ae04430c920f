"""All fourteen shapes through a real server: one at a time, many at once, streamed, dropped by their clients."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image
from websockets.sync.client import connect

from mstar.testing.miniatures import MINIATURES, Example, Miniature, miniature

from .serving import Server, serving

ONE_SHOT = [m for m in MINIATURES if not m.live]
LIVE = [m for m in MINIATURES if m.live]
by_key = pytest.mark.parametrize("mini", ONE_SHOT, ids=lambda m: m.key)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = [m.key for m in MINIATURES]
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def body(mini: Miniature, example: Example, **more: Any) -> dict[str, Any]:
    return {"model": mini.key, "text": example.text, "model_kwargs": dict(example.knobs), **more}


def heard(item: dict[str, Any]) -> np.ndarray:
    """int16 samples: whole answers are WAV files, deltas bare PCM."""
    data = base64.b64decode(item["data"])
    if item["encoding"] == "pcm_s16le":
        return np.frombuffer(data, dtype="<i2")
    with wave.open(io.BytesIO(data)) as wav:
        assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 8000)
        return np.frombuffer(wav.readframes(wav.getnframes()), dtype="<i2")


def picture(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def assert_outputs(mini: Miniature, example: Example, outputs: dict[str, list[dict[str, Any]]]) -> None:
    expected = mini.expected(example)
    for stream, want in expected.items():
        items = outputs[mini.streams[stream]]
        if isinstance(want, str):
            assert "".join(i["text"] for i in items) == want
        elif mini.streams[stream] == "audio":
            samples = np.concatenate([heard(i) for i in items])
            # The server clips to -1…1 and rounds to 16 bits.
            np.testing.assert_allclose(samples, np.rint(want.clip(-1, 1) * 32767), atol=1)
        elif mini.streams[stream] == "image":
            np.testing.assert_allclose(picture(items[0]["data"]).astype(float), want[0], atol=1)
        elif mini.streams[stream] == "video":
            np.testing.assert_allclose([picture(frame) for i in items for frame in i["frames"]], want)
        else:
            got = np.concatenate([np.asarray(i["data"], dtype=np.float64) for i in items])
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=max(mini.tolerance, 1e-6))


@by_key
def test_whole_answers(server: Server, mini: Miniature) -> None:
    rng = random.Random(10)
    for example in [mini.example(rng) for _ in range(2)]:
        answer = server.http.post("/generate", json=body(mini, example))
        assert answer.status_code == 200, answer.text
        assert_outputs(mini, example, answer.json()["outputs"])


def test_usage_of_a_speaking_model(server: Server) -> None:
    ask = {"model": "mini_tts", "text": "hello", "model_kwargs": {"max_tokens": 6}}
    answer = server.http.post("/generate", json=ask).json()
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["input"]) == (5, 6, {"tokens": 5})
    assert usage["output"]["tokens"] == 6
    assert usage["output"]["audio_seconds"] == pytest.approx(len(heard(answer["outputs"]["audio"][0])) / 8000)


@by_key
def test_many_at_once(server: Server, mini: Miniature) -> None:
    rng = random.Random(11)
    examples = [mini.example(rng) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda e: server.http.post("/generate", json=body(mini, e)), examples))
    for example, answer in zip(examples, answers, strict=True):
        assert_outputs(mini, example, answer.json()["outputs"])


@by_key
def test_streamed(server: Server, mini: Miniature) -> None:
    example = mini.example(random.Random(12))
    outputs: dict[str, list[dict[str, Any]]] = {}
    with server.http.stream("POST", "/generate", json=body(mini, example, streaming=True)) as answer:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[-1]["type"] == "done", lines[-1]
    for line in lines[:-1]:
        assert line["type"] == "delta"
        outputs.setdefault(line["modality"], []).append(line)
    assert_outputs(mini, example, outputs)


@pytest.mark.parametrize("mini", LIVE, ids=lambda m: m.key)
def test_live_over_a_socket(server: Server, mini: Miniature) -> None:
    """Two requests in flight on one socket, their inputs interleaved; the answers keep apart."""
    rng = random.Random(13)
    examples = {name: mini.example(rng) for name in ("one", "two")}
    outputs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in examples}
    with connect(server.url.replace("http", "ws") + "/generate/ws") as socket:
        for name in examples:
            socket.send(json.dumps({"id": name, "model": mini.key, "live": list(mini.live)}))
        for turn in range(6):
            for name, example in examples.items():
                for stream, items in example.appends[turn : turn + 1]:
                    socket.send(json.dumps({"id": name, "append": {stream: items.tolist()}}))
        for name in examples:
            socket.send(json.dumps({"id": name, "end_input": True}))
        running = set(examples)
        while running:
            line = json.loads(socket.recv(timeout=30))
            assert line["type"] in ("delta", "done"), line
            if line["type"] == "done":
                running.remove(line["id"])
            else:
                outputs[line["id"]].setdefault(line["modality"], []).append(line)
    for name, example in examples.items():
        assert_outputs(mini, example, outputs[name])


@by_key
def test_a_client_that_leaves_frees_everything(server: Server, mini: Miniature) -> None:
    example = mini.example(random.Random(14))
    with server.http.stream("POST", "/generate", json=body(mini, example, streaming=True)) as answer:
        assert answer.status_code == 200
        next(answer.iter_raw(1))
    for name, usage in server.pools()[mini.key].items():
        assert usage["used"] == 0, f"{name} of {mini.key} still holds {usage}"


def test_a_session_is_resumed_over_http(server: Server) -> None:
    mini = miniature("mini_rollout")
    ask = {"model": mini.key, "session": "my world", "model_kwargs": {"windows": 3, "drive": 1.0}}
    first = server.http.post("/generate", json=ask).json()["outputs"]["state"]
    second = server.http.post("/generate", json=ask).json()["outputs"]["state"]
    x = np.asarray(first[-1]["data"], dtype=np.float64)[-1]
    got = np.concatenate([np.asarray(i["data"], dtype=np.float64) for i in second])
    for index in range(3):
        x = x * 0.5 + 1.0 + index
        np.testing.assert_allclose(got[index], x, rtol=1e-5)
