"""What went wrong in other servers, asked of this one with a model that follows a script: rows of the list of cases
that are about the server alone. Those about text are in tests/test_http_cases.py."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from mstar.spec.tasks import Image as ImagePart
from mstar_server.app import create_app

from .test_every_route import SPOKEN, picture
from .test_hostile import connection

CHAT = "/v1/chat/completions"
MIB = 1 << 20
LIMIT_S = 60


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def seen(url, **more):
    """A chat about the picture at *url*."""
    content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_sees_the_picture(kit, stream):
    tiny = kit.Service(kit.HELLO)
    async with kit.client(tiny) as client:
        answer = await client.post(CHAT, json=seen(data_url(picture()), n=3, seed=5, stream=stream))
    assert answer.status_code == 200
    pictures = [task.messages[0].content[1] for task in tiny.tasks]
    assert len(pictures) == 3
    assert all(isinstance(part, ImagePart) and part.pixels.shape == (16, 16, 3) for part in pictures)
    assert len({task.knobs.seed for task in tiny.tasks}) == 3
    if not stream:
        assert {choice["message"]["content"] for choice in answer.json()["choices"]} == {"Hello 🙂"}


def every_route(kit):
    """(method, path) of all routes, as a client writes them."""
    for path, operations in create_app({}, kit.Hooks()).openapi()["paths"].items():
        for method in operations:
            yield method.upper(), re.sub(r"{[^}]*}", "x", path)
    yield from (("GET", "/generate/ws"), ("GET", "/v1/realtime"), ("GET", "/"), ("GET", "/docs"))


@pytest.mark.parametrize(
    "head",
    [b"".join(b"x-%d: y\r\n" % number for number in range(20_000)), b"x: " + b"y" * 200_000 + b"\r\n"],
    ids=["thousands", "huge"],
)
async def test_a_head_too_large_is_refused_on_every_route(kit, chat, head):
    routes = list(every_route(kit))
    assert len(routes) > 35
    async with kit.server(kit.Service(kit.HELLO), max_body_bytes=MIB) as address:
        before = psutil.Process().memory_info().rss
        for method, path in routes:
            async with connection(address) as (reader, writer):
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n".encode() + head + b"\r\n")
                said = await reader.read()
            assert said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), (method, path, said[:80])
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large", path
        assert psutil.Process().memory_info().rss - before < 40 * MIB
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize("size", [(500, 19), (19, 500), (1, 1), (1, 900), (31, 33), (257, 255)])
async def test_odd_sizes_are_answered(kit, size):
    out = io.BytesIO()
    Image.new("RGB", size).save(out, "JPEG")
    tiny = kit.Service(kit.HELLO)
    async with kit.client(tiny) as client:
        assert (await client.post(CHAT, json=seen(data_url(out.getvalue())))).status_code == 200
    assert tiny.tasks[0].messages[0].content[1].pixels.shape == (size[1], size[0], 3)


ADDRESSES = (
    "http://127.0.0.1:9/x", "http://169.254.169.254/latest/meta-data", "http://10.0.0.1/x", "http://192.168.1.1/",
    "http://[::1]/x", "http://[::ffff:127.0.0.1]/", "http://0.0.0.0/", "http://2130706433/", "http://localhost/",
)  # fmt: skip

BY_URL = {
    CHAT: ("chat", lambda url: {"json": seen(url)}),
    f"{CHAT} audio": (
        "chat",
        lambda url: {"json": {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": url}]}]}},
    ),
    "/v1/responses": (
        "chat",
        lambda url: {"json": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}},
    ),
    "/v1/audio/speech": ("speech", lambda url: {"json": {"input": "hi", "ref_audio": url}}),
    "/v1/images/edits": ("image_edit", lambda url: {"json": {"prompt": "hi", "images": [{"image_url": url}]}}),
    "/v1/images/edits mask": (
        "image_edit",
        lambda url: {"json": {"prompt": "hi", "image": data_url(picture()), "mask": {"image_url": url}}},
    ),
    "/v1/videos": ("video", lambda url: {"json": {"prompt": "hi", "input_reference": {"image_url": url}}}),
    "/v1/videos/generations": ("video", lambda url: {"json": {"prompt": "hi", "input_reference": url}}),
}
"""Every way to name a file by its URL."""


@pytest.mark.parametrize("way", BY_URL)
async def test_every_route_fetches_through_the_one_guarded_fetcher(kit, way):
    ability, asked = BY_URL[way]
    tiny = kit.Service(kit.HELLO, abilities=(ability,))
    for allowed in (False, True):
        async with kit.client(tiny, allow_remote_media=allowed, fetch_timeout_s=5.0) as client:
            for url in ADDRESSES:
                sent = asked(url)
                sent["json"]["model"] = "tiny"
                answer = await client.post(way.partition(" ")[0], **sent)
                assert answer.status_code == 400, (url, answer.text)
                assert answer.json()["error"]["code"] == "url_not_allowed", (url, answer.text)
    assert not tiny.tasks


async def test_a_request_with_a_picture_opens_no_connection(kit, monkeypatch):
    """Whatever libraries it passes."""

    def refused(*arguments, **more):
        raise AssertionError(f"a connection to {arguments[1:]}")

    tiny = kit.Service(kit.HELLO)
    async with kit.client(tiny) as client:
        monkeypatch.setattr(socket.socket, "connect", refused)
        monkeypatch.setattr(socket.socket, "connect_ex", refused)
        monkeypatch.setattr(socket, "getaddrinfo", refused)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", refused, raising=False)
        for _ in range(2):
            assert (await client.post(CHAT, json=seen(data_url(picture())))).status_code == 200
    assert len(tiny.tasks) == 2


GIB = 1024 * MIB


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
@pytest.mark.parametrize("route", ["/v1/audio/transcriptions", "/v1/images/edits", "/generate", "/v1/audio/voices"])
async def test_two_gigabytes_are_refused_with_the_limit_and_held_nowhere(kit, chat, route, chunked):
    """However they are announced."""
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    piece = bytes(MIB)
    sent = 0

    tiny = kit.Service(kit.HELLO, abilities=("chat", "generate", "transcription", "image_edit", "speech"))
    async with kit.server(tiny, max_body_bytes=64 * MIB) as address, connection(address) as (reader, writer):
        before = psutil.Process().memory_info().rss
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {2 * GIB}"
        kind = "Content-Type: multipart/form-data; boundary=x"
        writer.write(f"POST {route} HTTP/1.1\r\nHost: x\r\n{kind}\r\n{length}\r\n\r\n".encode())
        answered = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        try:
            for number in range(2 * GIB // MIB):
                data = head + piece if number == 0 else piece
                writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
                await writer.drain()
                sent += len(data)
                if answered.done():
                    break
        except ConnectionError:
            pass
        assert (await answered).startswith(b"HTTP/1.1 413 ")
        body = await reader.read()
        error = json.loads(body[body.index(b"{") :])["error"]
        assert error["code"] == "too_large"
        assert str(64 * MIB) in error["message"]
        assert sent < 200 * MIB, "it is answered while the client still sends"
        assert psutil.Process().memory_info().rss - before < 100 * MIB
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.post(CHAT, json=chat())).status_code == 200
    assert len(tiny.tasks) == 1


async def test_sound_of_a_silent_video_is_none(kit):
    """A model that takes both gets the pictures."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for _ in range(5):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode())
    url = f"data:video/mp4;base64,{base64.b64encode(out.getvalue()).decode()}"
    tiny = kit.Service(kit.HELLO, inputs=("text", "image", "audio", "video"))
    async with kit.client(tiny) as client:
        content = [{"type": "video_url", "video_url": {"url": url}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        assert (await client.post(CHAT, json=body)).status_code == 200
    (video,) = tiny.tasks[0].messages[0].content
    assert (len(video.frames) > 0, video.audio) == (True, None)


async def test_one_damaged_clip_among_many_fails_alone(kit):
    tiny = kit.Service(kit.HELLO)
    good = {"type": "input_audio", "input_audio": {"data": SPOKEN, "format": "wav"}}
    bad = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"fLaC" + bytes(100)).decode()}}

    async def ask(client, part):
        body = {"model": "tiny", "messages": [{"role": "user", "content": [part, good]}]}
        return (await client.post(CHAT, json=body)).status_code

    async with kit.client(tiny) as client:
        statuses = await asyncio.gather(*(ask(client, bad if number % 3 == 1 else good) for number in range(12)))
        assert await ask(client, good) == 200
    assert [status == 200 for status in statuses] == [number % 3 != 1 for number in range(12)]
    assert all(status in (200, 400, 415, 422) for status in statuses)
