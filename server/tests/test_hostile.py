"""Unlucky clients and hostile ones: what they send is refused in the one error form, and disturbs nobody."""

import asyncio
import contextlib
import gzip
import json

import httpx
import pytest

from mstar_server.options import MIB

CHAT = "/v1/chat/completions"
LIMIT_S = 20

BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi", "instructions": "be brief"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/generate": {"model": "tiny", "text": "hi"},
}
by_route = pytest.mark.parametrize("route", BODIES)


def service(kit):
    return kit.Service(kit.HELLO, abilities=("chat", "completion", "embedding", "generate"))


async def assert_alive(client, chat):
    assert (await client.post(CHAT, json=chat())).status_code == 200


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


async def post(client, route, content, **headers):
    return await client.post(route, content=content, headers={"content-type": "application/json", **headers})


@by_route
async def test_a_compressed_body_is_refused_unread(kit, chat, route):
    """A bomb of a megabyte could hold gigabytes; nothing here unpacks one."""
    async with kit.client(service(kit)) as client:
        bomb = gzip.compress(b" " * (20 * MIB) + json.dumps(BODIES[route]).encode())
        answer = await post(client, route, bomb, **{"content-encoding": "gzip"})
        assert error_of(answer, 415)["code"] == "unsupported_content_encoding"
        assert answer.headers["accept-encoding"] == "identity"
        plain = await post(client, CHAT, json.dumps(chat()), **{"content-encoding": "identity"})
        assert plain.status_code == 200


@by_route
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "limit"),
        (b'{"model": "\xff\xfe"}', "byte 11 is not UTF-8"),
        (b'{"model": "tiny"', "at character"),
    ],
    ids=["deep list", "deep object", "huge integer", "no UTF-8", "cut"],
)
async def test_a_body_that_cannot_be_parsed_says_why(kit, chat, route, content, said):
    async with kit.client(service(kit)) as client:
        error = error_of(await post(client, route, content))
        assert error["code"] == "invalid_json"
        assert said in error["message"]
        await assert_alive(client, chat)


@by_route
async def test_nesting_has_a_limit_that_is_said(kit, chat, route):
    deep = []
    for _ in range(300):
        deep = [deep, [], []]
    async with kit.client(service(kit)) as client:
        error = error_of(await client.post(route, json={**BODIES[route], "metadata": {"a": deep}}))
        assert (error["code"], error["param"]) == ("nested_too_deeply", "metadata")
        assert "128 levels" in error["message"]
        await assert_alive(client, chat)


def halves(body):
    """*body* with half a surrogate pair in each of its strings, one at a time; the field's name; and as a new field."""
    for field, value in body.items():
        if isinstance(value, str):
            yield field, {**body, field: f"{value}\ud83d"}
    yield "user\ud83d", {**body, "user\ud83d": 1}
    yield "metadata.a", {**body, "metadata": {"a": "\ude00"}}
    if "messages" in body:
        yield "messages[0].content", {**body, "messages": [{"role": "user", "content": "\ud800"}]}


@by_route
async def test_half_a_surrogate_pair_is_no_text(kit, chat, route):
    async with kit.client(service(kit)) as client:
        for field, body in halves(BODIES[route]):
            for ascii_only in (True, False):  # JSON's escape, and the bytes that Python would decode to the same
                content = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
                error = error_of(await post(client, route, content))
                assert error["code"] == "invalid_unicode"
                assert error["param"] == field.encode("utf-8", "backslashreplace").decode()
        whole = chat(messages=[{"role": "user", "content": "\U0001f600"}])
        assert (await post(client, CHAT, json.dumps(whole, ensure_ascii=True))).status_code == 200


@pytest.mark.parametrize("query", ["limit=0", "limit=99999999999999999999999", "limit=x", "order=%ff"])
async def test_a_wrong_query_parameter_is_named(kit, query):
    async with kit.client(service(kit)) as client:
        error = error_of(await client.get(f"/v1/responses/resp_1/input_items?{query}"))
    assert error["param"] == query.partition("=")[0]


async def leave(writer):
    """Close a connection, whatever is still to be sent: one that outlives its loop is a later test's garbage."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def connection(address):
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(LIMIT_S):
            yield reader, writer
    finally:
        await leave(writer)


def head(length, route=CHAT):
    return (
        f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n".encode()
    )


def late(data):
    assert data.startswith(b"HTTP/1.1 408 "), data
    error = json.loads(data.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "request_timeout"
    return error["message"]


async def test_a_head_has_a_time_even_if_it_drips(kit, chat):
    async with kit.server(service(kit), head_timeout_s=0.5) as address, connection(address) as (reader, writer):
        writer.write(head(5))
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and not reader._buffer:
                writer.write(b"x")
                await asyncio.sleep(0.05)
        assert "head took longer than 0.5 s" in late(await reader.read())


async def test_a_connection_that_says_nothing_is_closed(kit):
    async with kit.server(service(kit), head_timeout_s=0.2) as address, connection(address) as (reader, _):
        assert await reader.read() == b""


async def test_a_head_that_stops_on_a_used_connection_has_a_time_too(kit):
    async with kit.server(service(kit), head_timeout_s=0.2) as address, connection(address) as (reader, writer):
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readuntil(b'"live"}')
        writer.write(b"GET /health")
        late(await reader.read())


@by_route
async def test_a_body_that_stops_has_a_time(kit, chat, route):
    tiny = service(kit)
    async with kit.server(tiny, body_timeout_s=0.3) as address:
        async with connection(address) as (reader, writer):
            writer.write(head(1000, route) + b'\r\n{"model":')
            assert "body paused for more than 0.3 s" in late(await reader.read())
        assert not tiny.answers
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            await assert_alive(client, chat)


async def test_a_body_that_goes_on_has_all_the_time_that_it_needs(kit, chat):
    content = json.dumps(chat()).encode()
    limits = {"head_timeout_s": 0.2, "body_timeout_s": 0.4}
    async with kit.server(service(kit), **limits) as address, connection(address) as (reader, writer):
        writer.write(head(len(content)) + b"Connection: close\r\n\r\n")
        for place in range(0, len(content), 8):
            await asyncio.sleep(0.1)
            writer.write(content[place : place + 8])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_may_take_longer_than_a_request(kit, chat):
    """The times are for what clients send: neither a slow model nor the next head behind it ends an answer."""
    finish = asyncio.Event()
    tiny = kit.Service((*kit.HELLO, finish))
    content = json.dumps(chat()).encode()
    limits = {"head_timeout_s": 0.1, "body_timeout_s": 0.1}
    async with kit.server(tiny, **limits) as address, connection(address) as (reader, writer):
        writer.write(head(len(content)) + b"\r\n" + content)
        await asyncio.sleep(0.05)
        writer.write(b"GET /health/live HTT")
        await asyncio.sleep(0.5)
        finish.set()
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_who_uploads_too_much_gets_the_answer(kit, chat, chunked):
    """Closing at once would reset the connection under the client's feet, and the 413 would be lost."""
    large = b"x" * (8 * MIB)

    async def pieces():
        for place in range(0, len(large), 65536):
            yield large[place : place + 65536]
            await asyncio.sleep(0.001)

    async with (
        kit.server(service(kit), max_body_bytes=MIB) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=LIMIT_S) as client,
    ):
        answer = await post(client, CHAT, pieces() if chunked else large)
        assert error_of(answer, 413)["code"] == "too_large"
        await assert_alive(client, chat)


async def test_requests_behind_each_other_are_answered_in_order(kit):
    async with kit.server(service(kit)) as address, connection(address) as (reader, writer):
        ask = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(ask * 300 + ask.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 301


@pytest.mark.parametrize(
    "wrong",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"Content-Length: -5\r\n\r\n",
        b"Content-Length: 99999999999999999999999999\r\n\r\n",
        b"X-A: b\rX-C: d\r\n\r\n",
        b"X-A: \x00\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["both", "two", "negative", "huge", "bare CR", "NUL", "bad chunk"],
)
async def test_heads_that_two_servers_could_read_differently_are_refused(kit, wrong):
    """Request smuggling needs a head with two meanings."""
    async with kit.server(service(kit)) as address, connection(address) as (reader, writer):
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n" + wrong)
        data = await reader.read()
        assert data.startswith(b"HTTP/1.1 400 "), data
        assert data.count(b"HTTP/1.1 ") == 1


async def test_a_thousand_idle_connections_are_no_trouble(kit, chat):
    async with kit.server(service(kit), head_timeout_s=1.0) as address, contextlib.AsyncExitStack() as stack:
        host, port = address.split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(400)]
        for _, writer in idle:
            stack.push_async_callback(leave, writer)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=LIMIT_S) as client:
            await assert_alive(client, chat)
            async with asyncio.timeout(LIMIT_S):
                assert not any(await asyncio.gather(*(reader.read() for reader, _ in idle)))
            await assert_alive(client, chat)
