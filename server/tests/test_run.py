"""A real server on the loopback: disconnects, start-up, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import threading
import time

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError

from mstar.cluster.base import Phase
from mstar.collector import YOUNG_OBJECTS
from mstar.spec.errors import FaultFound, RequestError, SetupError
from mstar.spec.processor import TextDelta
from mstar_server.options import ServerOptions
from mstar_server.run import bind, serve, serve_async

CHAT = "/v1/chat/completions"
LIMIT_S = 5.0


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def post(address: str, path: str, body: dict) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def test_the_official_client_chats(kit):
    service = kit.Service(kit.HELLO)
    messages = [{"role": "user", "content": "hi"}]
    async with kit.server(service) as address, AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x") as client:
        whole = await client.chat.completions.create(model="tiny", messages=messages, extra_body={"top_k": 2})
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=messages, temperature=-1)
        service.script = [*kit.HELLO, RequestError("worker died", code="worker_died", status=503)]
        broken = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        with pytest.raises(APIError, match="worker died"):
            _ = [part async for part in broken]
        names = [model.id async for model in client.models.list()]
    assert whole.choices[0].message.content == "Hello 🙂"
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "Hello 🙂"
    assert parts[-1].usage.total_tokens == 10
    assert (caught.value.param, names) == ("temperature", ["tiny"])


async def test_keepalives_do_not_disturb_the_official_client(kit):
    release = asyncio.Event()
    service = kit.Service([release, *kit.HELLO])
    async with (
        kit.server(service, keepalive_s=0.02) as address,
        AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts = []
        async for part in stream:
            texts.append(part.choices[0].delta.content)
            if len(texts) == 3:
                release.set()
    assert texts[:3] == ["", "", ""]
    assert "".join(texts) == "Hello 🙂"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("when", ["whole", "before the first event", "in the stream"])
async def test_a_client_that_leaves_cancels_its_requests(kit, chat, when, n):
    never = asyncio.Event()
    service = kit.Service([*kit.HELLO, never] if when == "in the stream" else [never])
    async with kit.server(service) as address:
        reader, writer = await post(address, CHAT, chat(stream=when != "whole", n=n))
        await until(lambda: len(service.answers) == n)
        if when == "in the stream":
            await asyncio.wait_for(reader.readuntil(b'"content":"Hel"'), LIMIT_S)
        assert not any(answer.cancelled.is_set() for answer in service.answers)
        await kit.leave(writer)
        await until(lambda: all(answer.cancelled.is_set() for answer in service.answers))


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_cancels_its_native_request(kit, streaming):
    service = kit.Service([*kit.HELLO, asyncio.Event()])
    async with kit.server(service) as address:
        _, writer = await post(address, "/generate", {"streaming": streaming})
        await until(lambda: service.answers and service.answers[0].said == len(kit.HELLO))
        await kit.leave(writer)
        await until(lambda: service.answers[0].cancelled.is_set())


async def test_a_slow_reader_holds_its_own_request_back(kit, chat):
    service = kit.Service()
    big = TextDelta("x" * 100_000, (1,))
    service.script = lambda number: [big] * 1000 if number == 0 else kit.HELLO
    async with kit.server(service) as address:
        _, writer = await post(address, CHAT, chat(stream=True))
        await until(lambda: service.answers and service.answers[0].said > 10)
        async with httpx.AsyncClient() as client:
            other = await client.post(f"http://{address}{CHAT}", json=chat())
        assert other.status_code == 200
        assert service.answers[0].said < 500
        await kit.leave(writer)
        await until(lambda: service.answers[0].cancelled.is_set())


async def exchange(kit, address: str, *pieces: bytes) -> bytes:
    """Send *pieces* as far as the server takes them and read what it answers until it closes."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    try:
        return await asyncio.wait_for(answer, LIMIT_S)
    finally:
        await kit.leave(writer)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"x-%d: y\r\n" % number for number in range(1000)],
        [b"x: " + b"y" * 5000 + b"\r\n\r\n"],
        [b"x: ", *[b"y" * 500] * 12],
        [b"x" * 5000],
    ],
    ids=["many", "huge", "endless value", "endless name"],
)
async def test_a_huge_head_is_a_431(kit, pieces):
    async with kit.server(kit.Service(kit.HELLO), max_head_bytes=1000) as address:
        answer = await exchange(kit, address, b"GET /health/live HTTP/1.1\r\n", *pieces)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            for _ in range(15):  # one connection: heads are counted one by one
                assert (await client.get("/health/live")).status_code == 200
            large = await client.post(
                CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]}
            )
            assert large.status_code == 200


async def test_what_is_no_http_is_a_400_of_the_contract(kit):
    async with kit.server(kit.Service(kit.HELLO)) as address:
        answer = await exchange(kit, address, b"hello?\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_the_port_is_open_while_models_load(kit, chat):
    service = kit.Service(kit.HELLO)
    service.phase = Phase(name="weights", progress=0.5)
    async with kit.server(service) as address, httpx.AsyncClient(base_url=f"http://{address}") as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).json()["models"]["tiny"]["phase"] == "weights"
        assert (await client.post(CHAT, json=chat())).status_code == 503
        service.started.set()
        await until(lambda: service.phase.name == "ready")
        assert (await client.get("/health/ready")).status_code == 200
        assert (await client.post(CHAT, json=chat())).status_code == 200
    assert service.stopped


async def test_a_long_start_says_what_it_waits_for(kit, monkeypatch, caplog):
    monkeypatch.setattr("mstar_server.run.TELL_S", 0.01)
    caplog.set_level("INFO", "mstar.server")
    quick, slow = kit.Service(kit.HELLO, key="quick"), kit.Service(kit.HELLO)
    slow.phase = Phase(name="warmup", detail="compiling")
    async with kit.server(quick, slow):
        await until(lambda: "not ready yet (tiny: warmup, compiling)" in caplog.messages)
        slow.started.set()
        await until(lambda: any(message.startswith("ready on") for message in caplog.messages))


@contextlib.asynccontextmanager
async def ready_server(kit, service, **options):
    """A ready server's task and a client of it."""
    settings = ServerOptions(port=0, **options)
    listener = bind(settings)
    host, port = listener.getsockname()
    running = asyncio.create_task(serve_async({"tiny": service}, kit.Hooks(), settings, listener))
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=LIMIT_S) as client:
            async with asyncio.timeout(LIMIT_S):
                while (await client.get("/health/ready")).status_code != 200:
                    await asyncio.sleep(0.005)
            yield running, client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_sigterm_refuses_new_requests_and_lets_running_ones_end(kit, chat):
    release = asyncio.Event()
    service = kit.Service([release, *kit.HELLO])
    async with ready_server(kit, service, drain_s=30.0) as (running, client):
        request = asyncio.create_task(client.post(CHAT, json=chat()))
        await until(lambda: service.answers)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.phase.name == "draining")
        refused = await client.post(CHAT, json=chat())
        ready = await client.get("/health/ready")
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await client.get("/health/live")).status_code == 200
        release.set()
        assert (await request).json()["choices"][0]["message"]["content"] == "Hello 🙂"
        await asyncio.wait_for(running, LIMIT_S)
    assert service.stopped


async def test_sigterm_while_a_model_loads_stops_at_once(kit):
    service = kit.Service()
    service.phase = Phase(name="weights")
    settings = ServerOptions(port=0)
    running = asyncio.create_task(serve_async({"tiny": service}, kit.Hooks(), settings, bind(settings)))
    before = signal.getsignal(signal.SIGTERM)
    await until(lambda: signal.getsignal(signal.SIGTERM) is not before)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, LIMIT_S)
    assert service.stopped


@pytest.mark.parametrize("how", ["bound", "second signal"])
async def test_draining_has_an_end(kit, chat, how):
    service = kit.Service([*kit.HELLO, asyncio.Event()])
    async with ready_server(kit, service, drain_s=0.05 if how == "bound" else 60.0) as (running, client):
        request = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: service.answers)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.phase.name in ("draining", "stopped"))
        if how == "second signal":
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(running, LIMIT_S)
        assert "Hel" in (await request).text
    assert service.answers[0].cancelled.is_set()


def test_a_model_that_cannot_start_ends_the_server_with_its_sentence(kit):
    service, other = kit.Service(), kit.Service(key="other")
    service.start_error = FaultFound("the weights are gone")
    with pytest.raises(FaultFound, match="the weights are gone"):
        serve({"tiny": service, "other": other}, kit.Hooks(), ServerOptions(port=0))
    assert service.stopped
    assert other.stopped


def test_a_serving_process_spares_the_collector_what_is_there_at_the_start(kit):
    before, seen = gc.get_threshold(), []

    def stop_when_ready() -> None:
        deadline = time.monotonic() + LIMIT_S
        while gc.get_threshold() == before and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.extend((gc.get_threshold()[0], gc.get_freeze_count()))
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_when_ready)
    stopper.start()
    serve({"tiny": kit.Service()}, kit.Hooks(), ServerOptions(port=0, drain_s=0.1))
    stopper.join()
    assert seen[0] == YOUNG_OBJECTS
    assert seen[1] > 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_a_taken_port_is_a_sentence(kit):
    with bind(ServerOptions(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(ServerOptions(port=port))
