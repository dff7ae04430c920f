"""Both sockets with clients that flood, leave in the middle, and say too much at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mstar.spec.processor import ArrayDelta, TextDelta

LIMIT_S = 60.0
ROUTES = ("/generate/ws", "/v1/realtime?model=tiny")
by_route = pytest.mark.parametrize("route", ROUTES)


def asks(route: str, text: str, number: int = 0) -> str:
    """A message that is answered."""
    if route == ROUTES[0]:
        return json.dumps({"id": f"r{number}", "text": text})
    part = {"type": "input_text", "text": text}
    item = {"type": "message", "role": "user", "content": [part]}
    return json.dumps({"type": "conversation.item.create", "item": item})


def service(kit, script=None):
    return kit.Service(script or [TextDelta("ok")], abilities=("chat", "generate"))


@contextlib.asynccontextmanager
async def opened(address, route):
    async with (
        asyncio.timeout(LIMIT_S),
        connect(f"ws://{address}{route}", max_size=None, max_queue=None) as socket,
    ):
        yield socket


async def assert_alive(address, route):
    async with opened(address, route) as socket:
        await socket.send(asks(route, "hi"))
        for _ in range(2):  # the realtime session tells itself first
            assert json.loads(await socket.recv())["type"] in ("delta", "done", "session.created", *ITEM)


def complaints(caplog):
    """What the server, and uvicorn below it, logged as an error."""
    return [r for r in caplog.records if r.levelno >= logging.ERROR]


ITEM = ("conversation.item.added", "conversation.item.done")


async def test_many_requests_share_one_writer(kit):
    """Every frame is one whole message, and those of a request come in order."""
    numbers = np.arange(20_000, dtype=np.float32)  # in JSON encoded in threads, all at once
    tiny = service(kit, [ArrayDelta(numbers[:n], stream="x") for n in (20_000, 1, 20_000, 2)])
    async with kit.server(tiny) as address, opened(address, ROUTES[0]) as socket:
        for number in range(12):
            await socket.send(asks(ROUTES[0], "hi", number))
        heard: dict[str, list[int]] = {}
        ended = 0
        while ended < 12:
            event = json.loads(await socket.recv())
            if event["type"] == "done":
                ended += 1
            else:
                heard.setdefault(event["id"], []).append(len(event["data"]))
                assert event["index"] == len(heard[event["id"]]) - 1
    assert list(heard.values()) == [[20_000, 1, 20_000, 2]] * 12


@by_route
async def test_too_large_a_message_is_told_and_the_socket_goes_on(kit, route):
    async with kit.server(service(kit), max_socket_message_bytes=1000) as address, opened(address, route) as socket:
        await socket.send(asks(route, "x" * 1000))
        while (event := json.loads(await socket.recv()))["type"] == "session.created":
            pass
        assert (event["type"], event["error"]["code"]) == ("error", "too_large")
        assert "1000 bytes" in event["error"]["message"]
        await socket.send(asks(route, "hi"))
        assert json.loads(await socket.recv())["type"] in ("delta", *ITEM)


@by_route
async def test_a_message_far_too_large_closes_the_socket_and_no_other(kit, route, caplog):
    """While the server writes, too."""
    tiny = service(kit, [*[TextDelta("x" * 100)] * 300, asyncio.Event()])
    async with kit.server(tiny, max_socket_message_bytes=1000) as address:
        async with opened(address, route) as socket:
            for number in range(40):
                await socket.send(asks(route, "hi", number))
            with contextlib.suppress(ConnectionClosed):
                await socket.send("x" * 100_000)
                while True:
                    await socket.recv()
            assert socket.close_code == 1009
        await assert_alive(address, route)
    assert all(answer.cancelled.is_set() for answer in tiny.answers)
    assert not complaints(caplog)


@by_route
@pytest.mark.parametrize("how", ["aborted", "closed", "unread"])
async def test_who_floods_and_leaves_costs_no_error(kit, route, how, caplog):
    """What is sent to a client that has gone is nobody's fault."""
    tiny = service(kit, [*[TextDelta("x" * 2000)] * 50, asyncio.Event()])
    async with kit.server(tiny, max_socket_requests=10_000) as address:
        async with opened(address, route) as socket:
            for number in range(300):
                await socket.send(asks(route, "hi", number))
            if how == "aborted":
                socket.transport.abort()
            elif how == "closed":
                await socket.recv()
        await assert_alive(address, route)
        for answer in tiny.answers[:-1]:
            async with asyncio.timeout(LIMIT_S):
                await answer.cancelled.wait()
    assert not complaints(caplog)
