"""``/v1/images``: requests that end before all of their pictures are made. Models are scripted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mstar.spec.canvas import Canvas, Sizes
from mstar.spec.errors import RequestError
from mstar.spec.processor import FramesDelta
from mstar_server.media.encode.images import base64_text, png

PICTURE = FramesDelta(np.zeros((1, 4, 6, 3), np.uint8))
ROUTE = "/v1/images/generations"


@pytest.fixture
def painting(kit: Any) -> Callable[..., Any]:
    """Makes a model whose picture *i* follows script *i*."""

    def make(*scripts: Sequence[Any]) -> Any:
        return kit.Service(lambda number: scripts[number], abilities=("image",))

    return make


async def cancelled(kit: Any, service: Any, ready: Callable[[], bool], **body: Any) -> Any:
    """The answer to a request that is cancelled by its id once *ready*."""
    async with kit.client(service) as client:
        sent = {"model": "tiny", "prompt": "a bird", **body}
        asking = asyncio.create_task(client.post(ROUTE, json=sent, headers={"X-Request-ID": "mine"}))
        async with asyncio.timeout(20):
            while not ready():
                await asyncio.sleep(0.005)
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        return await asking


@pytest.mark.parametrize("n", [1, 2])
async def test_who_cancels_before_the_first_picture_is_told_so(kit: Any, painting: Any, n: int) -> None:
    service = painting([asyncio.Event()], [asyncio.Event()])
    reply = await cancelled(kit, service, lambda: len(service.answers) == n, n=n)
    assert (reply.status_code, reply.json()["error"]["code"]) == (499, "request_cancelled")


async def test_who_cancels_later_gets_what_there_is(kit: Any, painting: Any) -> None:
    service = painting([PICTURE], [asyncio.Event()])
    reply = await cancelled(kit, service, lambda: len(service.answers) == 2 and service.answers[0].said == 1, n=2)
    assert reply.status_code == 200
    assert len(reply.json()["data"]) == 1


async def test_a_stream_that_is_cancelled_says_so_last(
    kit: Any, painting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    service = painting([PICTURE], [asyncio.Event()])
    ready = lambda: len(service.answers) == 2 and service.answers[0].finish_reason is not None  # noqa: E731
    reply = await cancelled(kit, service, ready, n=2, stream=True)
    *_, made, last = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert (made["type"], made["image_index"]) == ("image_generation.completed", 0)
    assert (last["type"], last["status"], last["error"]["code"]) == ("error", 499, "request_cancelled")
    assert "unhandled" not in caplog.text


async def test_a_model_that_makes_no_picture_is_at_fault(kit: Any, painting: Any) -> None:
    async with kit.client(painting([])) as client:
        reply = await client.post(ROUTE, json={"model": "tiny", "prompt": "a bird"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize(("own", "said"), [(5000, 5000), (9000, 8000), (None, 8000)])
async def test_the_list_of_models_says_which_sizes_the_server_takes(kit: Any, own: int | None, said: int) -> None:
    canvas = Canvas(Sizes(multiple=16, max_pixels=own))
    async with kit.client(kit.Service(abilities=("image",), canvas=canvas), max_pixels=8000) as client:
        assert (await client.get("/v1/models/tiny")).json()["canvas"]["sizes"]["max_pixels"] == said


@pytest.mark.parametrize("size", ["large", "4096x4096", "4100x4100", "4097x20", "0x0", "16x48000", "101x101"])
@pytest.mark.parametrize(
    ("own", "deployed", "server"), [(None, 9000, 50_000_000), (None, None, 9000), (9000, 5000, 8000)]
)
async def test_the_first_size_that_is_named_is_one_that_is_made(
    kit: Any, monkeypatch: pytest.MonkeyPatch, size: str, own: int | None, deployed: int | None, server: int
) -> None:
    """Within the model's limits, the deployment's, which are known once it is loaded, and the server's."""
    sizes = Sizes(multiple=16, min_side=16, max_side=8192, max_pixels=own)
    service = kit.Service([PICTURE], abilities=("image",), canvas=Canvas(sizes))
    async with kit.client(service, max_pixels=server) as client:
        loaded = Canvas(dataclasses.replace(sizes, max_pixels=deployed))
        monkeypatch.setattr(type(service), "canvas", loaded)
        refused = await client.post(ROUTE, json={"model": "tiny", "prompt": "a bird", "size": size})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
        named = refused.json()["error"]["message"].rpartition(" ")[2]
        taken = await client.post(ROUTE, json={"model": "tiny", "prompt": "a bird", "size": named})
    assert taken.status_code == 200, f"{refused.text}, then {taken.text}"
    (task,) = service.tasks
    loaded.check_size(task.size)


@pytest.mark.parametrize("value", ["low", "high"])
async def test_a_field_of_edits_alone_is_unknown_to_generations(kit: Any, painting: Any, value: str) -> None:
    sent = {"model": "tiny", "prompt": "a bird", "input_fidelity": value}
    async with kit.client(painting([PICTURE])) as client:
        error = (await client.post(ROUTE, json=sent)).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "input_fidelity")
    assert "what it takes" not in error["message"]


FILE = "data:image/png;base64," + base64_text(png(np.zeros((4, 6, 3), np.uint8)))


@pytest.fixture
def editing(kit: Any) -> Any:
    canvas = Canvas(references=4)
    return kit.Service([PICTURE], abilities=("image_edit",), canvas=canvas, inputs=("text", "image"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("pictures", "said", "named"),
    [
        ({"images": [{"image_url": FILE}, FILE]}, "image[0]", "images[0].image_url"),
        ({"images": [{"image_url": FILE}, FILE]}, "image[1]", "images[1]"),
        ({"images": [FILE]}, "image", "images[0]"),
        ({"image": FILE}, "image", "image"),
        ({"image": [FILE, FILE]}, "image[1]", "image[1]"),
        ({"images": [FILE]}, "imager", "imager"),
    ],
)
async def test_what_a_processor_says_of_a_picture_is_said_of_its_field(
    kit: Any, editing: Any, stream: bool, pictures: dict[str, Any], said: str, named: str
) -> None:
    editing.refuse = RequestError(f"{said!r}: too small", param=said)
    sent = {"model": "tiny", "prompt": "a bird", "stream": stream, **pictures}
    async with kit.client(editing) as client:
        reply = await client.post("/v1/images/edits", json=sent)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["message"]) == (400, named, f"{named!r}: too small")


@pytest.mark.parametrize(
    ("reference", "param", "message"),
    [
        ({"imgae_url": FILE}, "images[0].imgae_url", "did you mean 'image_url'?"),
        ({}, "images[0].image_url", "is required"),
        ({"file_id": "file-1"}, "images[0].file_id", "stores no files"),
    ],
)
async def test_what_is_wrong_with_a_picture_in_json_is_named(
    kit: Any, editing: Any, reference: dict[str, str], param: str, message: str
) -> None:
    async with kit.client(editing) as client:
        sent = {"model": "tiny", "prompt": "a bird", "images": [reference]}
        reply = await client.post("/v1/images/edits", json=sent)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]


async def test_the_size_that_is_named_for_what_is_none_can_be_made(kit: Any, painting: Any) -> None:
    async with kit.client(painting([]), max_pixels=8000) as client:
        refused = await client.post(ROUTE, json={"model": "tiny", "prompt": "a bird", "size": "large"})
    assert refused.status_code == 400
    width, height = map(int, refused.json()["error"]["message"].rpartition(" ")[2].split("x"))
    assert 0 < width * height <= 8000
