"""``/v1/images``: requests that end before all of their pictures are made. Models are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mstar.spec.canvas import Canvas, Sizes
from mstar.spec.processor import FramesDelta

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


async def test_the_size_that_is_named_for_what_is_none_can_be_made(kit: Any, painting: Any) -> None:
    async with kit.client(painting([]), max_pixels=8000) as client:
        refused = await client.post(ROUTE, json={"model": "tiny", "prompt": "a bird", "size": "large"})
    assert refused.status_code == 400
    width, height = map(int, refused.json()["error"]["message"].rpartition(" ")[2].split("x"))
    assert 0 < width * height <= 8000
