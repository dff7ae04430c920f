"""The files of pictures are made beside each other and beside the model's work, and never on the event loop."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import threading
import weakref

import httpx
import numpy as np
import pytest
from PIL import Image

from mstar.spec.processor import FramesDelta
from mstar_server.media.encode import images, png
from mstar_server.media.encode.parallel import Helpers
from mstar_server.parts import PartsResponse
from mstar_server.routes import images as route

COUNT = 3
ROUTE, BODY = "/v1/images/generations", {"model": "tiny", "prompt": "hi"}
NOISE = np.random.default_rng(0).integers(0, 256, (900, 1000, 3), dtype=np.uint8)
"""Its file has eleven parts."""


def painted(number):
    return FramesDelta(np.full((1, 8, 16, 3), 40 * number + 5, np.uint8))


def shade(data):
    return int(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))[0, 0, 0])


@pytest.fixture
def together(monkeypatch):
    """A PNG file is done when the others have begun; where and which, in order."""
    barrier, plain, began = threading.Barrier(COUNT), images.png_parts, []

    def encode(pixels, *form):
        began.append((threading.current_thread(), int(pixels[0, 0, 0])))
        barrier.wait(20)
        return plain(pixels, *form)

    monkeypatch.setattr(images, "png_parts", encode)
    return began


@pytest.mark.parametrize("stream", [False, True])
async def test_files_of_several_pictures_are_made_side_by_side(kit, together, stream):
    tiny = kit.Service(lambda number: [painted(number)], abilities=("image",))
    async with kit.client(tiny) as client:
        answer = await client.post(
            "/v1/images/generations", json={"model": "tiny", "prompt": "hi", "n": COUNT, "stream": stream}
        )
    assert answer.status_code == 200, answer.text
    assert {thread for thread, _ in together}.isdisjoint({threading.current_thread()})
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert sorted((e["image_index"], shade(e["b64_json"])) for e in events) == [(0, 5), (1, 45), (2, 85)]
    else:
        assert [shade(picture["b64_json"]) for picture in answer.json()["data"]] == [5, 45, 85], "in their order"
        assert answer.json()["size"] == "16x8"
        assert int(answer.headers["content-length"]) == len(answer.content)


async def test_a_file_is_made_while_other_pictures_are_not_there_yet(kit, monkeypatch):
    """The last picture comes when the file of the first is done."""
    loop, plain, done = asyncio.get_running_loop(), images.png_parts, asyncio.Event()

    def encode(pixels, *form):
        file = plain(pixels, *form)
        loop.call_soon_threadsafe(done.set)
        return file

    monkeypatch.setattr(images, "png_parts", encode)
    tiny = kit.Service(lambda number: [done, painted(1)] if number else [painted(0)], abilities=("image",))
    async with kit.client(tiny) as client, asyncio.timeout(20):
        answer = await client.post("/v1/images/generations", json={"model": "tiny", "prompt": "hi", "n": 2})
    assert [shade(picture["b64_json"]) for picture in answer.json()["data"]] == [5, 45]


async def test_the_server_answers_others_while_files_are_made(kit, monkeypatch):
    """On all routes that have pictures."""
    going_on, plain = threading.Event(), images.png_parts

    def encode(pixels, *form):
        assert going_on.wait(20), "nobody else was answered"
        return plain(pixels, *form)

    monkeypatch.setattr(images, "png_parts", encode)
    tiny = kit.Service([painted(2)], abilities=("image", "generate"))
    async with kit.client(tiny) as client, asyncio.timeout(30):
        asking = [
            client.post("/v1/images/generations", json={"model": "tiny", "prompt": "hi"}),
            client.post("/generate", json={"model": "tiny", "text": "hi"}),
        ]
        asked = [asyncio.create_task(post) for post in asking]
        while not all(tiny_answer.finish_reason for tiny_answer in tiny.answers) or len(tiny.answers) < 2:
            await asyncio.sleep(0)
        assert (await client.get("/v1/models")).status_code == 200
        going_on.set()
        picture, native = [await task for task in asked]
    assert shade(picture.json()["data"][0]["b64_json"]) == 85
    assert shade(native.json()["outputs"]["image"][0]["data"]) == 85


def exact(picture):
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["b64_json"])))), NOISE)


async def test_an_answer_in_parts_is_one_answer(kit):
    """With its length, on a connection that goes on; two pictures are two."""
    tiny = kit.Service([FramesDelta(NOISE[None])], abilities=("image",))
    async with kit.server(tiny) as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
        for n in (1, 2):
            answer = await client.post(ROUTE, json={**BODY, "n": n})
            assert int(answer.headers["content-length"]) == len(answer.content)
            assert "transfer-encoding" not in answer.headers
            assert set(answer.json()) == {
                "created", "data", "background", "output_format", "quality", "size", "usage"
            }  # fmt: skip
            assert len(answer.json()["data"]) == n
            for picture in answer.json()["data"]:
                exact(picture)


async def asked(address):
    """The two ends of a connection that a picture was asked for on."""
    reader, writer = await asyncio.open_connection(*address.split(":"), limit=1 << 12)
    data = json.dumps(BODY).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize("where", ["making", "sending"])
async def test_who_leaves_early_leaves_nothing_behind(kit, monkeypatch, where):
    """No part of the answer, and no thread that is not idle."""
    helpers, plain, sent = Helpers(2), images.png_parts, []
    began, going_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def encode(pixels, *form):
        loop.call_soon_threadsafe(began.set)
        assert going_on.wait(20)
        return plain(pixels, *form)

    class Kept(PartsResponse):
        def __init__(self, *given):
            super().__init__(*given)
            sent.append(weakref.ref(self))

    monkeypatch.setattr(png, "HELPERS", helpers)
    monkeypatch.setattr(images, "png_parts", encode)
    monkeypatch.setattr(route, "PartsResponse", Kept)
    large = np.tile(NOISE, (4, 4, 1))  # more than sockets take when nobody reads
    tiny = kit.Service(lambda number: [FramesDelta((NOISE if number else large)[None])], abilities=("image",))
    async with kit.server(tiny) as address, asyncio.timeout(60):
        reader, writer = await asked(address)
        await began.wait()
        if where == "making":
            await kit.leave(writer)
            going_on.set()
        else:
            going_on.set()
            await reader.readuntil(b'"b64_json"')
            assert sent[0]() is not None
            writer.transport.abort()
            await kit.leave(writer)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            exact((await client.post(ROUTE, json=BODY)).json()["data"][0])
        while any(each() is not None for each in sent):
            gc.collect()
            await asyncio.sleep(0)
        assert len(sent) == (1 if where == "making" else 2)
    barrier = threading.Barrier(3)
    assert len(set(await asyncio.to_thread(helpers.map, lambda: lambda _: barrier.wait(20), range(3)))) == 3
