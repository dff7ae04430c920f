"""The files of pictures are made beside each other and beside the model's work, and never on the event loop."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading

import numpy as np
import pytest
from PIL import Image

from mstar.spec.processor import FramesDelta
from mstar_server.media.encode import images

COUNT = 3


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
