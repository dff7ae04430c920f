"""The life of a request, whatever its route: its id, its time, its end by its client's will or absence."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from fastapi import APIRouter
from websockets.asyncio.client import connect

from mstar.hookspecs import hookimpl
from mstar.spec.errors import RequestError
from mstar_server.answers import start
from mstar_server.exchange import _Named

CHAT = "/v1/chat/completions"
LIMIT_S = 5.0


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("given", ["req-of-mine.7:a_b", None, "two words", "x" * 129, "é", ""])
async def test_every_answer_has_an_id(kit, chat, given):
    headers = {} if given is None else {"X-Request-ID": given.encode()}
    async with kit.client(kit.Service(kit.HELLO), headers=headers) as client:
        replies = [
            await client.get("/v1/models"),
            await client.post(CHAT, json=chat()),
            await client.post(CHAT, json=chat(stream=True)),
            await client.post(CHAT, json=chat(temperature=-1)),
            await client.get("/nowhere"),
            await client.get("/health/live"),
        ]
    names = [reply.headers["x-request-id"] for reply in replies]
    if given == "req-of-mine.7:a_b":
        assert names == [given] * len(replies)
    else:
        assert len(set(names)) == len(replies)
        assert all(name.startswith("req-") for name in names)


async def test_a_head_that_is_refused_has_an_id_too(kit):
    async with kit.server(kit.Service(), max_head_bytes=500) as address, httpx.AsyncClient() as client:
        reply = await client.get(f"http://{address}/health/live", headers={f"x-{n}": "y" for n in range(100)})
    assert (reply.status_code, reply.headers["x-request-id"][:4]) == (431, "req-")


async def test_log_lines_carry_the_id_and_no_secret(kit, chat, caplog):
    caplog.set_level(logging.INFO, "mstar.server")
    with caplog.filtering(_Named()):
        await _ask_thrice(kit, chat)
    records = [record for record in caplog.records if record.name == "mstar.server"]
    lines = [record.getMessage() for record in records]
    assert [record.request_id for record in records] == ["mine", "other"]
    assert lines[0].startswith(f"POST {CHAT}: 200 in ")
    assert ", key 'api-key', chatcmpl-" in lines[0]
    assert lines[1].startswith("GET /a%0Ab: 404 in ")
    assert len(lines) == 2, "probes are not logged"
    assert "hush" not in caplog.text


async def _ask_thrice(kit, chat) -> None:
    async with kit.client(kit.Service(kit.HELLO), api_key="hush") as client:
        headers = {"authorization": "Bearer hush", "x-request-id": "mine"}
        await client.post(f"{CHAT}?api_key=hush", json=chat(), headers=headers)
        await client.get("/a%0Ab", headers={"authorization": "Bearer hush", "x-request-id": "other"})
        await client.get("/health", headers={"x-request-id": "probe"})


# --- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e9"])
async def test_a_time_limit_that_is_none(kit, chat, value):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(CHAT, json=chat(), headers={"X-Request-Timeout": value})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "X-Request-Timeout")
    assert value in error["message"]


async def test_the_time_that_is_left_goes_with_the_task(kit, chat):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        await client.post(CHAT, json=chat(), headers={"X-Request-Timeout": "30"})
        await client.post("/generate", json={"text": "x"})
    assert 29 < service.tasks[0].timeout <= 30
    assert service.tasks[1].timeout is None


async def test_what_never_reaches_the_engine_ends_in_time(kit, monkeypatch):
    """A route that hangs before it starts anything, a plugin's."""
    monkeypatch.setattr("mstar_server.exchange._LATE_S", 0.05)
    ended = asyncio.Event()

    class Plugin:
        @hookimpl
        def mstar_api(self, registry):
            router = APIRouter()

            @router.get("/slow")
            async def slow() -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            return [router]

    async with kit.client(kit.Service(), hooks=kit.Hooks(Plugin())) as client:
        reply = await asyncio.wait_for(client.get("/slow", headers={"X-Request-Timeout": "0.05"}), LIMIT_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    assert "longer than 0.05 s" in reply.json()["error"]["message"]
    assert ended.is_set()


# --- a client that leaves ----------------------------------------------------------------------------------------


async def test_a_route_that_forgets_its_client_is_ended_all_the_same(kit):
    """A plugin's route that starts an answer and watches nothing; and one whose work outlives it."""
    kept = []

    class Plugin:
        @hookimpl
        def mstar_api(self, registry):
            router = APIRouter()

            def serve(path: str, **more) -> None:
                @router.post(path)
                async def careless() -> dict[str, str]:
                    kept.extend(await start(service, [TASK], f"x-{path[1:]}", **more))
                    if path == "/left":
                        return {}
                    await asyncio.Event().wait()
                    return {}

            serve("/careless")
            serve("/left")
            serve("/job", outlives=True)
            return [router]

    from mstar.spec.tasks import GenerateTask

    TASK = GenerateTask(knobs=None)
    service = kit.Service([asyncio.Event()])
    async with kit.client(service, hooks=kit.Hooks(Plugin())) as client:
        assert (await client.post("/left")).status_code == 200
        assert service.answers[0].cancelled.is_set(), "what a route leaves behind ends with it"
        for number, path in enumerate(["/careless", "/job"], 1):
            request = asyncio.create_task(client.post(path))
            await until(lambda n=number: len(service.answers) == n + 1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
    await until(lambda: service.answers[1].cancelled.is_set())
    assert not service.answers[2].cancelled.is_set()


async def test_a_client_that_leaves_while_it_sends_is_no_bug(kit, caplog):
    async with kit.server(kit.Service(kit.HELLO)) as address:
        for path in (CHAT, "/generate"):
            _, writer = await asyncio.open_connection(*address.split(":"))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            writer.write(head.encode() + b"{")
            await writer.drain()
            await asyncio.sleep(0.05)
            await kit.leave(writer)
        await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# --- cancel by id ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["X-Request-ID", "the answer's id"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_cancel_by_id(kit, chat, by, stream, n):
    service = kit.Service([*kit.HELLO, asyncio.Event()])
    async with kit.client(service) as client:
        request = asyncio.create_task(
            client.post(CHAT, json=chat(stream=stream, n=n), headers={"X-Request-ID": "mine"})
        )
        await until(lambda: len(service.answers) == n and all(a.said == len(kit.HELLO) for a in service.answers))
        if by == "X-Request-ID":
            reply = await client.post("/v1/requests/mine/cancel")
        else:
            reply = await client.delete(f"/v1/requests/{service.ids[0][0]}")
        if n == 2 and by != "X-Request-ID":
            assert not service.answers[1].cancelled.is_set(), "only the answer that was named"
            service.answers[1].cancel()
        answer = await asyncio.wait_for(request, LIMIT_S)
        again = await client.post("/v1/requests/mine/cancel")
    assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    assert answer.status_code == 200
    assert answer.text.count('"finish_reason":"cancelled"') == n
    assert "Hel" in answer.text
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


async def test_cancel_before_the_engine_has_it(kit, chat):
    """While its body is read, or its media are decoded: there is nothing to answer with yet."""
    service = kit.Service(kit.HELLO)

    preparing = asyncio.Event()

    async def slowly(*arguments):
        preparing.set()
        await asyncio.Event().wait()

    service.generate = slowly
    async with kit.client(service) as client:
        request = asyncio.create_task(client.post(CHAT, json=chat(), headers={"X-Request-ID": "mine"}))
        await asyncio.wait_for(preparing.wait(), LIMIT_S)
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        answer = await asyncio.wait_for(request, LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")


async def test_a_request_does_not_cancel_itself(kit):
    async with kit.client(kit.Service()) as client:
        reply = await client.post("/v1/requests/me/cancel", headers={"X-Request-ID": "me"})
    assert reply.status_code == 404


async def test_nobody_cancels_anothers(kit, chat, keys):
    path, secrets = keys("alice", "bob")
    service = kit.Service([*kit.HELLO, asyncio.Event()])
    alice, bob = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    async with kit.client(service, api_keys=path) as client:
        request = asyncio.create_task(client.post(CHAT, json=chat(), headers={**alice, "X-Request-ID": "r"}))
        await until(lambda: service.answers)
        for name in ("r", service.ids[0][0]):
            assert (await client.delete(f"/v1/requests/{name}", headers=bob)).status_code == 404
        assert not service.answers[0].cancelled.is_set()
        assert (await client.delete("/v1/requests/r", headers=alice)).status_code == 200
        assert (await asyncio.wait_for(request, LIMIT_S)).status_code == 200
    assert service.tasks[0].tenant.startswith("key-")


async def test_requests_of_a_socket_are_exchanges_of_their_own(kit, keys):
    path, secrets = keys("alice", max_requests=2)
    service = kit.Service(["echo"])
    headers = {"authorization": f"Bearer {secrets[0]}"}
    async with kit.server(service, api_keys=path) as address:
        async with connect(f"ws://{address}/generate/ws", additional_headers=headers) as socket:
            for name in ("a", "b", "c"):
                await socket.send(json.dumps({"id": name, "live": ["audio"]}))
            refused = json.loads(await asyncio.wait_for(socket.recv(), LIMIT_S))
            assert (refused["id"], refused["error"]["code"]) == ("c", "rate_limit_exceeded")
            await until(lambda: len(service.answers) == 2)
            async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers) as client:
                assert (await client.delete(f"/v1/requests/{service.ids[0][0]}")).status_code == 200
            done = json.loads(await asyncio.wait_for(socket.recv(), LIMIT_S))
            assert (done["id"], done["finish_reason"]) == ("a", "cancelled")
            assert not service.answers[1].cancelled.is_set()
        await until(lambda: service.answers[1].cancelled.is_set())


# --- limits ------------------------------------------------------------------------------------------------------


async def test_requests_in_flight_per_key(kit, chat, keys):
    path, (alice, bob) = keys("alice", "bob")
    release = asyncio.Event()
    service = kit.Service([release, *kit.HELLO])
    async with kit.client(service, api_keys=path, max_key_requests=2) as client:

        def ask(secret: str):
            return asyncio.create_task(client.post(CHAT, json=chat(), headers={"x-api-key": secret}))

        running = [ask(alice), ask(alice), ask(bob)]
        await until(lambda: len(service.answers) == 3)
        refused = await ask(alice)
        listing = await client.get("/v1/models", headers={"x-api-key": alice})
        release.set()
        assert [reply.status_code for reply in await asyncio.gather(*running)] == [200] * 3
        after = await ask(alice)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (refused.headers["retry-after"], refused.json()["error"]["type"]) == ("1", "rate_limit_error")
    assert (listing.status_code, after.status_code) == (200, 200)


async def test_requests_a_minute_per_key(kit, chat, keys):
    path, (alice, bob) = keys("alice", "bob", requests_per_minute=2)
    async with kit.client(kit.Service(kit.HELLO), api_keys=path, key_requests_per_minute=1) as client:
        asked = [await client.post(CHAT, json=chat(), headers={"x-api-key": alice}) for _ in range(3)]
        other = await client.post(CHAT, json=chat(), headers={"x-api-key": bob})
    assert [reply.status_code for reply in asked] == [200, 200, 429], "the key's own limit, not the server's"
    assert 50 < int(asked[2].headers["retry-after"]) <= 60
    assert other.status_code == 200


async def test_a_full_queue_is_a_429_on_every_route(kit, chat):
    service = kit.Service()
    service.refuse = RequestError("full", code="queue_full", status=429, type="rate_limit_error")
    service.refuse.retry_after = 7.2
    async with kit.client(service) as client:
        replies = [
            await client.post(CHAT, json=chat()),
            await client.post(CHAT, json=chat(stream=True)),
            await client.post(CHAT, json=chat(n=2)),
            await client.post("/generate", json={"text": "x"}),
            await client.post("/generate", json={"text": "x", "streaming": True}),
        ]
    for reply in replies:
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "8")
        assert reply.json()["error"]["code"] == "queue_full"
