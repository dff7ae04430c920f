"""Who may use the server: keys, over every route and socket; browsers and proxies."""

from __future__ import annotations

import json
import os
import re
import time

import httpx
import pytest
from starlette.routing import Mount, Route, WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mstar.api_keys import add_key, digest_of, remove_key
from mstar.spec.errors import RequestError, SetupError
from mstar_server.app import create_app
from mstar_server.middleware import SUBPROTOCOL
from mstar_server.names import safe_name
from mstar_server.options import ServerOptions

CHAT = "/v1/chat/completions"


def walk(routes):
    """Every route of an application, those of routers that it includes among them."""
    for route in routes:
        inner = getattr(route, "routes", None)
        if inner is None:
            inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is not None and not isinstance(route, Route | WebSocketRoute):
            yield from walk(inner)
        else:
            yield route


async def test_every_route_of_the_router_but_health_wants_a_key(kit):
    service = kit.Service(kit.HELLO)
    app = create_app({"tiny": service}, kit.Hooks(), ServerOptions(api_key="k"))
    seen = set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for route in walk(app.routes):
            assert not isinstance(route, Mount)
            path = re.sub(r"{[^}]*}", "x", route.path)
            seen.add(path)
            for method in getattr(route, "methods", None) or ():
                status = (await client.request(method, path)).status_code
                is_open = path.startswith(("/health", "/playground")) or path == "/"
                assert (status == 401) != is_open, (method, path, status)
    assert {"/docs", "/openapi.json", CHAT, "/generate", "/generate/ws", "/v1/requests/x", "/health/live"} <= seen
    assert service.tasks == []


@pytest.mark.parametrize(
    ("headers", "query", "protocols", "fine"),
    [
        ({}, "", None, False),
        ({"Authorization": "Bearer wrong"}, "?api_key=sk", None, False),
        ({}, "?api_key=wrong", None, False),
        ({}, "", ["realtime"], False),
        ({"Authorization": "Bearer sk"}, "", None, True),
        ({"X-Api-Key": "sk"}, "", None, True),
        ({}, "?api_key=sk", None, True),
        ({}, "", ["realtime", f"{SUBPROTOCOL}sk", "openai-beta.realtime-v1"], True),
    ],
)
@pytest.mark.parametrize(("path", "first"), [("/generate/ws", "delta"), ("/v1/realtime", "session.created")])
async def test_a_socket_wants_the_key_as_http_does(kit, headers, query, protocols, fine, path, first):
    async with kit.server(kit.Service(kit.HELLO), api_key="sk") as address:
        asked = connect(f"ws://{address}{path}{query}", additional_headers=headers, subprotocols=protocols)
        if not fine:
            with pytest.raises(InvalidStatus) as caught:
                async with asked:
                    pass
            assert caught.value.response.status_code == 401
            return
        async with asked as socket:
            assert socket.subprotocol == (protocols[0] if protocols else None)
            await socket.send("{}")
            assert json.loads(await socket.recv())["type"] == first


async def test_the_key_in_a_query_opens_no_http_route(kit):
    """A query lands in logs of proxies; only where nothing else is possible is it taken."""
    async with kit.client(kit.Service(), api_key="k") as client:
        assert (await client.get("/v1/models?api_key=k")).status_code == 401


async def test_keys_of_a_file_come_and_go_without_a_restart(kit, tmp_path, caplog):
    path = tmp_path / "keys.json"
    _, alice = add_key(path, "alice")
    async with kit.client(kit.Service(), api_keys=path, api_key="typed") as client:

        async def status(secret: str) -> int:
            return (await client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})).status_code

        assert [await status(s) for s in (alice, "typed", digest_of(alice), "")] == [200, 200, 401, 401]
        _, bob = add_key(path, "bob")
        assert await status(bob) == 200
        remove_key(path, "alice")
        assert [await status(s) for s in (alice, bob)] == [401, 200]
        path.write_text("{")
        assert await status(bob) == 200, "a file that is half written takes no key away"
        assert "the keys stay as they were" in caplog.text
        os.unlink(path)
        assert [await status(s) for s in (bob, "typed")] == [401, 200]
        assert "is gone" in caplog.text
    assert alice not in caplog.text


async def test_a_key_past_its_time(kit, tmp_path):
    path = tmp_path / "keys.json"
    _, secret = add_key(path, "a")
    entry = json.loads(path.read_text())["keys"][0]
    path.write_text(json.dumps({"keys": [entry | {"expires": "2020-01-01T00:00:00+00:00"}]}))
    async with kit.client(kit.Service(), api_keys=path) as client:
        reply = await client.get("/v1/models", headers={"x-api-key": secret})
    assert reply.status_code == 401
    assert "this key has expired" in reply.json()["error"]["message"]


async def test_a_file_that_is_not_there_stops_the_start(kit, tmp_path):
    with pytest.raises(SetupError, match="`mstar key add NAME` makes one"):
        create_app({}, kit.Hooks(), ServerOptions(api_keys=tmp_path / "none.json"))


# --- browsers and proxies ----------------------------------------------------------------------------------------


async def test_pages_of_other_origins_only_where_they_are_named(kit, chat):
    origin = {"origin": "https://app.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(CHAT, json=chat(), headers=origin)
        assert "access-control-allow-origin" not in reply.headers
    async with kit.client(kit.Service(kit.HELLO), cors=("https://app.example",), api_key="k") as client:
        preflight = await client.options(CHAT, headers=ask)
        refused = await client.post(CHAT, json=chat(), headers=origin)
        fine = await client.post(CHAT, json=chat(), headers={**origin, "authorization": "Bearer k"})
        other = await client.options(CHAT, headers={**ask, "origin": "https://evil.example"})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    assert fine.status_code == 200
    assert "x-request-id" in fine.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("prefix", ["", "/mstar"])
async def test_below_a_path_of_a_proxy(kit, chat, prefix):
    """Whether the proxy cuts the path off or not; and no path opens what wants a key."""
    async with kit.client(kit.Service(kit.HELLO), root_path="/mstar", api_key="k") as client:
        assert (await client.get(f"{prefix}/health/live")).status_code == 200
        assert (await client.post(f"{prefix}{CHAT}", json=chat())).status_code == 401
        reply = await client.post(f"{prefix}{CHAT}", json=chat(), headers={"authorization": "Bearer k"})
        assert reply.status_code == 200
        for path in (
            "/health/../v1/models",
            "/health%2f..%2fv1/models",
            "//health/../v1/models",
            "/mstar/health/../docs",
        ):
            assert (await client.get(path)).status_code in (401, 404), path
        schema = await client.get(f"{prefix}/openapi.json", headers={"authorization": "Bearer k"})
        assert schema.json()["servers"] == [{"url": "/mstar"}]


@pytest.mark.parametrize(
    "path", ["/docs/../../../etc/passwd", "/docs/%2e%2e/%2e%2e/etc/passwd", "/..%5c..%5cx", "/%00"]
)
async def test_paths_lead_nowhere_else(kit, path):
    ranges = "bytes=" + ",".join("0-" for _ in range(5000))
    async with kit.client(kit.Service()) as client:
        began = time.monotonic()
        reply = await client.get(path, headers={"Range": ranges})
        docs = await client.get("/docs", headers={"Range": ranges})
    assert time.monotonic() - began < 10.0  # not minutes
    assert reply.status_code == 404
    assert docs.status_code == 200


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alloy", "my voice (2)", "Zoë", "声", "a.b-c_d", "x" * 128, "e\u0301t\u00e9"])
def test_names_that_are_fine(name):
    assert safe_name(name, "voice") == name


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "/etc/passwd", "..", ".", ".hidden", "a\0b", "a/b", "a\\b", "C:x", "%2e%2e", "%2e%2e%2fx",
        "%252e%252e", "a%00", "\uff0e\uff0e\uff0fx", "a\u2215b", "con", "NUL.wav", "lpt1", "x ", " x", "x.", "a\nb",
        "a\u202eb", "", "x" * 129, None, 3, ["a"], "~root", "$HOME", "a*", "\ud800",
    ],
)  # fmt: skip
def test_names_that_are_none(name):
    with pytest.raises(RequestError, match="'voice'") as caught:
        safe_name(name, "voice")
    assert (caught.value.status, caught.value.param) == (400, "voice")
