"""The Python client, sync and async, against a real server."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import mstar.client
from mstar.client import AsyncClient, Client, Result
from mstar.spec.errors import NotReady, RequestError, TooBusy
from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta, TextDelta
from mstar.spec.tasks import Audio, File, Image
from mstar.testing.miniatures import MINIATURES, Example, miniature
from mstar.testing.miniatures.catalog import speech_answer

from .serving import Server, serving

GAINS = np.arange(1, 5, dtype=np.float32)[:, None]


class Blocking:
    """An asynchronous object, called as if it were not: one set of tests serves both clients."""

    def __init__(self, inner: Any, runner: asyncio.Runner):
        self._inner, self._runner = inner, runner

    def _wrapped(self, value: Any) -> Any:
        if inspect.iscoroutine(value):
            value = self._runner.run(value)
        return Blocking(value, self._runner) if hasattr(value, "__anext__") else value

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return found
        return lambda *arguments, **named: self._wrapped(found(*arguments, **named))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            return await anext(self._inner)

        try:
            return self._runner.run(step())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        return self._wrapped(self._inner.__aenter__()) and self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self._inner.__aexit__(*error))


Make = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients of either kind; closes them."""
    with asyncio.Runner() as runner:
        made: list[Any] = []

        def build(*where: Any, **options: Any) -> Any:
            if request.param == "sync":
                made.append(Client(*where, **options))
            else:
                made.append(Blocking(AsyncClient(*where, **options), runner))
            return made[-1]

        yield build
        for client in made:
            client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = [m.key for m in MINIATURES]
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server, make: Make) -> Any:
    return make(server.url, timeout=60)


def expected(key: str, text: str = "", stream: str = "text", **knobs: Any) -> Any:
    return miniature(key).expected(Example(text, knobs))[stream]


# --- whole answers and streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Client", "Stream", "Live"])
def test_the_clients_are_twins(name: str) -> None:
    """Both are written by hand, over the same modules: what has to be awaited reads better so than what is derived."""

    def members(kind: type) -> dict[str, str]:
        public = {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}
        signs = {name: str(inspect.signature(value)) for name, value in public.items() if callable(value)}
        return {name: signs.get(name, "property").replace("Async", "") for name in public}

    found = members(getattr(mstar.client, name))
    assert "close" in found
    assert found == members(getattr(mstar.client, f"Async{name}"))


def test_text(client: Any) -> None:
    result = client.generate("hello", model="mini_chat", max_tokens=9)
    assert isinstance(result, Result)
    assert result.text == expected("mini_chat", "hello", max_tokens=9)
    assert (result.finish_reason, result.usage.output["tokens"], result.usage.input) == ("length", 9, {"tokens": 5})


def test_audio_and_its_file(client: Any, tmp_path: Path) -> None:
    sound = client.tts("hello", model="mini_tts", max_tokens=6)
    want = expected("mini_tts", "hello", "audio", max_tokens=6).clip(-1, 1)
    assert (sound.rate, sound.samples.dtype) == (8000, np.float32)
    np.testing.assert_allclose(sound.samples, want, atol=1e-4)
    sound.save(tmp_path / "x.wav")
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (8000, len(want))


def spoken(voice: str | None = None, sample: np.ndarray | None = None) -> np.ndarray:
    return speech_answer("hello", 6, voice, sample).clip(-1, 1)


def test_voices_by_name(client: Any, tmp_path: Path) -> None:
    """A model's own, a blend, and one that is uploaded, used, listed and forgotten."""
    own = client.tts("hello", model="mini_tts", voice="bob", max_tokens=6)
    assert (own.rate, own.samples.dtype) == (8000, np.float32)
    np.testing.assert_allclose(own.samples, spoken("bob"), atol=1e-4)
    blend = client.tts("hello", model="mini_tts", voice="ann+bob", max_tokens=6)
    np.testing.assert_allclose(blend.samples, spoken("ann+bob"), atol=1e-4)
    clip = np.linspace(-0.5, 0.5, 1003).astype(np.float32)
    own.save(tmp_path / "clip.wav")
    made = client.add_voice("my own", Audio(clip, 8000), text="hey", language="en")
    try:
        assert (made["name"], made["language"], made["uploaded"]) == ("my own", "en", True)
        assert made in client.voices(model="mini_tts")
        assert made not in client.voices(model="mini_omni")
        assert {"ann", "bob"} < {voice["id"] for voice in client.voices()}
        for name in (made["id"], "my own"):
            cloned = client.tts("hello", model="mini_tts", voice=name, ref_text="hey", max_tokens=6)
            np.testing.assert_allclose(cloned.samples, spoken(sample=clip), atol=1e-4)
        with pytest.raises(RequestError) as taken:
            client.add_voice("ann", tmp_path / "clip.wav")
        assert (taken.value.status, taken.value.param, taken.value.code) == (409, "name", "voice_exists")
    finally:
        client.delete_voice("my own")
    for call in (
        lambda: client.tts("hello", model="mini_tts", voice=made["id"]),
        lambda: client.delete_voice(made["id"]),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param in ("voice", "voice_id"), caught.value


def test_a_picture_and_its_file(client: Any, tmp_path: Path) -> None:
    picture = client.image("abc", model="mini_denoise", size=3)
    want = expected("mini_denoise", "abc", "image", size=3)
    assert (picture.frames.dtype, picture.frames.shape) == (np.uint8, (1, 3, 3, 3))
    np.testing.assert_allclose(picture.frames.astype(float), want, atol=1)
    picture.save(tmp_path / "x.png")
    np.testing.assert_array_equal(np.asarray(Pillow.open(tmp_path / "x.png")), picture.frames[0])


def test_arrays(client: Any) -> None:
    result = client.generate(model="mini_rollout", windows=3, drive=1.0)
    want = expected("mini_rollout", stream="state", windows=3, drive=1.0)
    np.testing.assert_allclose(np.concatenate(result.arrays), want)


def test_a_session_goes_on(client: Any) -> None:
    asked = {"model": "mini_rollout", "session": uuid.uuid4().hex, "drive": 1.0}
    first = np.concatenate(client.generate(windows=2, **asked).arrays)
    second = np.concatenate(client.generate(windows=1, **asked).arrays)
    np.testing.assert_allclose(second[0], first[-1] * 0.5 + 1.0)


@pytest.mark.parametrize("key", ["mini_chat", "mini_omni", "mini_denoise", "mini_rollout"])
def test_a_stream_joins_to_the_whole(client: Any, key: str) -> None:
    whole = client.generate("hello", model=key)
    with client.stream("hello", model=key) as stream:
        deltas = list(stream)
    assert len(deltas) > 1 or key == "mini_denoise"
    joined = Result.of(deltas, stream.finish_reason, stream.usage)
    assert (joined.text, joined.finish_reason) == (whole.text, whole.finish_reason)
    assert stream.usage.output == whole.usage.output
    for one, other in zip(joined.arrays + joined.images, whole.arrays + whole.images, strict=True):
        np.testing.assert_array_equal(one, other)
    if whole.audio is not None and joined.audio is not None:
        np.testing.assert_array_equal(joined.audio.samples, whole.audio.samples)


def test_the_rest_of_a_stream(client: Any) -> None:
    with client.stream("hello", model="mini_chat", max_tokens=8) as stream:
        first = next(iter(stream))
        assert isinstance(first, TextDelta)
        rest = stream.result()
    assert first.text + rest.text == expected("mini_chat", "hello", max_tokens=8)


def test_leaving_a_stream_frees_the_request(client: Any, server: Server) -> None:
    with client.stream("hello", model="mini_tts", max_tokens=200) as stream:
        next(iter(stream))
    assert all(pool["used"] == 0 for pool in server.pools()["mini_tts"].values())


def test_chat_whole_and_in_pieces(client: Any) -> None:
    text = expected("mini_chat", "hello", max_tokens=7)
    turns = [{"role": "user", "content": "hello"}]
    assert client.chat("hello", model="mini_chat", max_tokens=7) == text
    assert client.chat(turns, model="mini_chat", max_tokens=7) == text
    assert "".join(client.chat(turns, model="mini_chat", max_tokens=7, stream=True)) == text


def test_many_calls_at_once_from_threads(server: Server) -> None:
    texts = ["abcdefgh"[: 1 + n % 8] for n in range(24)]
    got: dict[int, str] = {}
    with Client(server.url, model="mini_chat") as client:
        threads = [
            threading.Thread(target=lambda n=n, t=t: got.__setitem__(n, client.generate(t).text))
            for n, t in enumerate(texts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {n: expected("mini_chat", text) for n, text in enumerate(texts)}


async def test_many_calls_at_once_in_one_loop(server: Server) -> None:
    texts = ["abcdefgh"[: 1 + n % 8] for n in range(40)]
    async with AsyncClient(server.url, model="mini_chat") as client:
        results = await asyncio.gather(*(client.generate(text) for text in texts))
    assert [r.text for r in results] == [expected("mini_chat", text) for text in texts]


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_control_loop(client: Any) -> None:
    with client.open(["observations"], model="mini_policy") as loop:
        for step in range(5):
            observation = np.asarray([[step, 1, -step]], np.float32)
            np.testing.assert_array_equal(loop.act(observation)[0], observation * GAINS)
        loop.end()
        assert (loop.result().arrays, loop.finish_reason) == ([], "end_of_input")


def test_pipelined_observations(client: Any) -> None:
    observations = [np.full((1, 3), n, np.float32) for n in range(40)]
    with client.open(["observations"], model="mini_policy", max_in_flight=4) as loop:
        assert [loop.push("observations", o) for o in observations] == list(range(40))
        assert loop._talk.in_flight <= 4
        loop.end()
        heard = list(loop)
    assert [h.seq for h in heard] == list(range(40))
    for observation, (delta, _) in zip(observations, heard, strict=True):
        assert isinstance(delta, ArrayDelta)
        np.testing.assert_array_equal(delta.data[0], observation * GAINS)


def test_one_observation(client: Any) -> None:
    actions = client.act({"observations": [[1, 2, 3], [4, 5, 6]]}, model="mini_policy")
    np.testing.assert_array_equal(actions, np.float32([[[1, 2, 3]], [[4, 5, 6]]]) * GAINS)


@pytest.mark.parametrize("key", ["mini_duplex", "mini_world"])
def test_live_sound_and_worlds(client: Any, key: str) -> None:
    mini = miniature(key)
    example = mini.example(random.Random(5))
    with client.open(mini.live, model=key) as live:
        for stream, items in example.appends:
            live.push(stream, items)
        live.end()
        result = live.result()
    want = mini.expected(example)
    if key == "mini_world":
        np.testing.assert_allclose(np.concatenate(result.arrays), want["frames"], atol=1e-5)
    else:
        assert result.text == want["text"]
        np.testing.assert_array_equal(result.audio.samples, want["audio"])  # float32 as the model made it
        assert result.usage.output["audio_seconds"] == len(want["audio"]) / 8000


def test_leaving_a_live_request_frees_it(client: Any, server: Server) -> None:
    with client.open(["controls"], model="mini_world") as live:
        live.push("controls", np.ones((2, 3)))
        next(live)
    assert all(pool["used"] == 0 for pool in server.pools()["mini_world"].values())


def test_what_the_model_refuses_while_live(client: Any) -> None:
    with client.open(["observations"], model="mini_policy") as loop:
        loop.push("observations", np.ones((1, 7), np.float32))
        with pytest.raises(RequestError, match="shape") as caught:
            next(loop)
        assert (caught.value.status, caught.value.param) == (400, "observations")
        assert list(loop) == []


async def test_many_live_requests_in_one_loop(server: Server) -> None:
    async with AsyncClient(server.url, model="mini_policy") as client:

        async def robot(number: int) -> None:
            async with await client.open(["observations"]) as loop:
                for step in range(5):
                    observation = np.asarray([[number, step, 1]], np.float32)
                    np.testing.assert_array_equal((await loop.act(observation))[0], observation * GAINS)

        await asyncio.gather(*(robot(number) for number in range(50)))


# --- failures -------------------------------------------------------------------------------------------------------


def refused(client: Any) -> None:
    with client.open(["x"], model="mini_cat") as live:
        next(live)


def test_errors_say_what_the_server_says(client: Any) -> None:
    for call, status, param in (
        (lambda: client.generate("x", model="mini_cat"), 404, "model"),
        (lambda: client.generate("x"), 400, "model"),
        (lambda: client.generate("x", model="mini_chat", temprature=1), 400, "model_kwargs.temprature"),
        (lambda: client.stream("", model="mini_chat"), 400, "text"),
        (lambda: client.chat([], model="mini_chat"), 400, "messages"),
        (lambda: client.chat("x", model="mini_chat", stream=True, n="many"), 400, "n"),
        (lambda: client.tokenize("x", model="mini_policy"), 400, "model"),
        (lambda: client.generate("x", [b"abc"], model="mini_chat"), 400, "files[0]"),
        (lambda: refused(client), 404, "model"),
        (lambda: client.tts("x", model="mini_tts", ref_text="y"), 400, "ref_text"),
        (lambda: client.tts("x", model="mini_tts", voice="ann", ref_text="y"), 400, "ref_text"),
        (lambda: client.tts("x", model="mini_tts", voice="ann", reference_audio=b"RIFF"), 400, "voice"),
        (lambda: client.tts("x", model="mini_tts", voice="anna"), 400, "voice"),
        (lambda: client.tts("x", voice="ann"), 400, "model"),
        (lambda: client.add_voice("y", b"no sound"), 415, "audio_sample"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert (caught.value.status, caught.value.param) == (status, param), caught.value
        assert str(caught.value)


def test_a_helper_whose_output_is_not_there(client: Any) -> None:
    with pytest.raises(RequestError, match="answered without audio"):
        client.tts("hello", model="mini_chat")


def test_mistakes_in_the_call(client: Any) -> None:
    with pytest.raises(TypeError, match="files is a list"):
        client.generate("x", "cat.png", model="mini_chat")
    with pytest.raises(FileNotFoundError):
        client.generate("x", ["/nowhere/cat.png"], model="mini_chat")
    with pytest.raises(TypeError, match="uint8"):
        client.generate("x", [np.zeros((2, 2))], model="mini_chat")


@pytest.mark.parametrize("call", ["generate", "stream", "open"])
def test_nobody_there(make: Make, call: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        client = make(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RequestError, match="is the server running") as caught:
            getattr(client, call)(["x"] if call == "open" else "x")
    assert caught.value.code == "connection_failed"


def test_not_a_web_address(make: Make) -> None:
    with pytest.raises(ValueError, match="http://"):
        Client("127.0.0.1:8000")


class Scripted:
    """A server that answers each connection with the next of *replies*, bytes as they are; then it closes."""

    def __init__(self, *replies: bytes):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._replies = list(replies)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for reply in self._replies:
            connection, _ = self.listener.accept()
            with connection:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(65536)
                head, _, body = asked.partition(b"\r\n\r\n")
                length = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
                while len(body) < length:
                    body += connection.recv(65536)
                self.asked.append(head + b"\r\n\r\n" + body)
                connection.sendall(reply)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(10)
        self.listener.close()


def refusal(message: str, code: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "param": None, "code": code}}).encode()


def reply(status: str, body: bytes, *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BUSY = reply("429 Busy", refusal("full", "queue_full"), "Retry-After: 0")
LATER = reply("503 Wait", refusal("loading", "not_ready"), "Retry-After: 7")
TEXT = [{"stream": "text", "text": "hi"}]
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "queued_s": 0.5}
WHOLE = {"id": "g", "outputs": {"text": TEXT}, "finish_reason": "stop", "usage": USAGE}
FINE = reply("200 OK", json.dumps(WHOLE).encode())


def test_retries_only_when_asked(make: Make) -> None:
    with Scripted(BUSY) as there, pytest.raises(TooBusy, match="full") as caught:
        make(there.url).generate("x")
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "queue_full", 0)
    with Scripted(LATER) as there, pytest.raises(NotReady) as later:
        make(there.url).generate("x")
    assert later.value.retry_after == 7
    with Scripted(BUSY, BUSY, FINE) as there:
        result = make(there.url, retries=2).generate("x")
    assert (result.text, result.usage.queued_s) == ("hi", 0.5)
    with Scripted(BUSY, BUSY) as there, pytest.raises(TooBusy):
        make(there.url, retries=1).generate("x")


def test_answers_of_something_else(make: Make) -> None:
    with Scripted(reply("502 Bad Gateway", b"<html>nginx</html>")) as there, pytest.raises(RequestError) as caught:
        make(there.url).generate("x")
    assert (caught.value.status, caught.value.code) == (502, "bad_answer")
    assert "nginx" in str(caught.value)


def test_a_stream_that_breaks_off(make: Make) -> None:
    line = b'{"type":"delta","modality":"text","stream":"text","index":0,"text":"a"}\n'
    chunk = f"{len(line):x}".encode() + b"\r\n" + line + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/x-ndjson\r\n\r\n"
    for rest in (b"", b"0\r\n\r\n"):  # torn, and ended without the last line
        with Scripted(head + chunk + rest) as there:
            stream = make(there.url).stream("x")
            assert next(stream).text == "a"
            with pytest.raises(RequestError, match="ended before the answer did") as caught:
                next(stream)
            assert caught.value.code == "connection_lost"


def test_an_error_in_the_middle_of_a_stream(make: Make) -> None:
    said = {"message": "m", "type": "t", "param": "p", "code": "c"}
    lines = json.dumps({"type": "error", "status": 429, "retry_after": 3.5, "error": said}).encode() + b"\n"
    with Scripted(reply("200 OK", lines)) as there, pytest.raises(TooBusy) as caught:
        make(there.url).stream("x").result()
    error = caught.value
    assert (error.message, error.type, error.param, error.code, error.retry_after) == ("m", "t", "p", "c", 3.5)


def test_the_key_is_sent_and_not_shown(make: Make) -> None:
    with Scripted(FINE) as there:
        client = make(there.url, "secret")
        client.generate("x")
    assert b"authorization: bearer secret" in there.asked[0].lower()
    assert "secret" not in repr(Client(there.url, "secret"))


def test_files_are_sent_in_their_order(make: Make, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_bytes(b"from a path")
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    sound = Audio(np.zeros(4, np.float32), 16_000)
    files = [tmp_path / "note.txt", b"just bytes", picture, Image(picture), sound, File(b"named", "n.bin", "x/y")]
    with Scripted(FINE) as there:
        make(there.url).generate("x", files, want=["text"], stop=["a", "b"], session="s", seed=np.int64(3))
    body = there.asked[0]
    places = [body.index(part) for part in (b"from a path", b"just bytes", b"\x89PNG", b"RIFF", b"named")]
    assert places == sorted(places)
    assert body.count(b"\x89PNG") == 2
    for part in (b'filename="note.txt"', b"text/plain", b"x/y", b'{"seed": 3}', b'name="session"'):
        assert part in body
    assert body.count(b'name="stop"') == 2


def test_a_silent_server(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = make(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3)
        begin = time.monotonic()
        with pytest.raises(RequestError, match=r"nothing came for 0\.3 s"):
            client.generate("x")
        assert time.monotonic() - begin < 5


def test_it_imports_neither_torch_nor_the_server() -> None:
    unwanted = {"torch", "mstar_server", "fastapi", "transformers"}
    code = f"import sys, mstar.client; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_video_is_saved_as_an_animation(tmp_path: Path) -> None:
    frames = np.stack([np.full((8, 8, 3), n * 60, np.uint8) for n in range(4)])
    video = FramesDelta(frames, 10.0, "video")
    for suffix in ("gif", "webp", "png"):
        video.save(tmp_path / f"x.{suffix}")
        with Pillow.open(tmp_path / f"x.{suffix}") as saved:
            assert getattr(saved, "n_frames", 1) == 4
    with pytest.raises(ValueError, match=r"\.gif, \.webp or \.png"):
        video.save(tmp_path / "x.mp4")
    AudioDelta(np.zeros((5, 2), np.float32), 48_000).save(tmp_path / "stereo.wav")
    with wave.open(str(tmp_path / "stereo.wav")) as file:
        assert (file.getnchannels(), file.getnframes()) == (2, 5)
