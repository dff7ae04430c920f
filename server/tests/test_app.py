from __future__ import annotations

import asyncio

import pytest
from fastapi import APIRouter

from mstar.cluster.base import Phase
from mstar.hookspecs import hookimpl
from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.processor import TextDelta

CHAT = "/v1/chat/completions"


async def test_models_are_listed_with_what_a_client_must_know(kit):
    async with kit.client(kit.Service(), kit.Service(key="org/other", abilities=("generate",))) as client:
        listing = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/org/other")).json()
        missing = await client.get("/v1/models/org/othre")
    assert listing["object"] == "list"
    first, second = listing["data"]
    assert (first["id"], first["object"], first["owned_by"]) == ("tiny", "model", "tests")
    assert isinstance(first["created"], int)
    assert (first["abilities"], first["routes"]) == (["chat", "generate"], [CHAT, "/generate"])
    assert first["modalities"]["input"] == ["text", "image", "audio"]
    assert first["licence"]["name"] == "Apache-2.0"
    assert first["limits"] == {"context": 64}
    assert first["knobs"]["steps"]["maximum"] == 50
    assert one == second
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "did you mean 'org/other'" in missing.json()["error"]["message"]


async def test_a_model_answers_to_its_other_names(kit, chat):
    names = {"gpt-9": "tiny", "org/gpt": "tiny"}
    async with kit.client(kit.Service(kit.HELLO), aliases=names) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [
            ("tiny", "tiny"),
            ("gpt-9", "tiny"),
            ("org/gpt", "tiny"),
        ]
        assert (await client.get("/v1/models/org/gpt")).json()["id"] == "org/gpt"
        assert (await client.post(CHAT, json=chat(model="gpt-9"))).status_code == 200
        wrong = await client.post(CHAT, json=chat(model="gpt-8"))
    assert wrong.status_code == 404
    assert "did you mean 'gpt-9'" in wrong.json()["error"]["message"]


async def test_a_server_without_routes_is_refused(kit):
    """MSTAR_PLUGINS names some, and not the server's own."""
    hooks = kit.Hooks()
    hooks.plugins.loaded.clear()
    with pytest.raises(SetupError, match=r"mstar_server\.plugin"):
        kit.client(kit.Service(), hooks=hooks)


@pytest.mark.parametrize("aliases", [{"gpt-9": "tinny"}, {"tiny": "tiny"}])
async def test_an_alias_of_nothing_or_in_a_models_place_is_refused(kit, aliases):
    with pytest.raises(SetupError, match="cannot stand for"):
        kit.client(kit.Service(), aliases=aliases)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completion", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods_use_the_contract(kit, method, path, status, code):
    async with kit.client(kit.Service()) as client:
        reply = await client.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code
    assert path in reply.json()["error"]["message"]


@pytest.mark.parametrize(("body", "code"), [("{", "invalid_json"), ("[]", "invalid_json"), ("", "invalid_json")])
async def test_bodies_that_are_no_json_object(kit, body, code):
    async with kit.client(kit.Service()) as client:
        reply = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        form = await client.post(CHAT, data={"model": "tiny"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert form.status_code == 400
    assert "application/json" in form.json()["error"]["message"]


async def test_a_body_over_the_limit_is_a_413_declared_or_not(kit, chat):
    async def pieces():
        for _ in range(10):
            yield b" " * 100

    async with kit.client(kit.Service(kit.HELLO), max_body_bytes=500) as client:
        headers = {"content-type": "application/json"}
        declared = await client.post(CHAT, content=b" " * 501, headers=headers)
        chunked = await client.post(CHAT, content=pieces(), headers=headers)
        form = await client.post("/generate", files=[("files", ("a", b"x" * 600))])
        fine = await client.post(CHAT, json=chat())
    for reply in (declared, chunked, form):
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
        assert "500 bytes" in reply.json()["error"]["message"]
    assert fine.status_code == 200


async def test_every_route_but_health_wants_the_key(kit, chat):
    async with kit.client(kit.Service(kit.HELLO), api_key="sécret") as client:
        schema = (await client.get("/openapi.json", headers={"authorization": "Bearer sécret".encode()})).json()
        assert CHAT in schema["paths"]
        for path, methods in schema["paths"].items():
            for method in methods:
                status = (await client.request(method.upper(), path)).status_code
                assert status == (200 if path.startswith("/health") else 401), path
        for bad in ("Bearer wrong", "secret", "Basic secret", "Bearer"):
            reply = await client.post(CHAT, json=chat(), headers={"authorization": bad})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/docs", "/openapi.json", "/healthy"):
            assert (await client.get(path)).status_code == 401
        reply = await client.post(CHAT, json=chat(), headers={"authorization": "Bearer sécret".encode()})
        assert reply.status_code == 200


async def test_the_openapi_document_has_the_request_schemas(kit):
    async with kit.client(kit.Service()) as client:
        document = (await client.get("/openapi.json")).json()
        assert (await client.get("/docs")).status_code == 200
    content = document["paths"]["/generate"]["post"]["requestBody"]["content"]
    assert content["multipart/form-data"]["schema"]["properties"]["files"]["items"]["format"] == "binary"
    assert "data" in content["application/json"]["schema"]["properties"]["files"]["items"]["properties"]
    assert "temperature" in document["components"]["schemas"]["ChatRequest"]["properties"]


async def test_a_plugins_router_is_mounted_through_the_hook(kit):
    class Plugin:
        @hookimpl
        def mstar_api(self, registry):
            router = APIRouter()

            @router.get("/extra")
            async def extra() -> dict[str, bool]:
                return {"registry": registry is hooks}

            return [router]

    hooks = kit.Hooks(Plugin())
    async with kit.client(kit.Service(), hooks=hooks) as client:
        assert (await client.get("/extra")).json() == {"registry": True}


async def test_a_plugins_path_wins_over_the_servers_own(kit):
    class Plugin:
        @hookimpl
        def mstar_api(self):
            router = APIRouter()

            @router.get("/v1/models")
            async def mine() -> list[str]:
                return ["mine"]

            return [router]

    async with kit.client(kit.Service(), hooks=kit.Hooks(Plugin())) as client:
        assert (await client.get("/v1/models")).json() == ["mine"]


async def test_a_plugin_that_breaks_a_contract_is_put_aside_and_the_others_serve(kit, chat, caplog):
    class NoRouters:
        @hookimpl
        def mstar_api(self):
            return "a router"

    class NoAdapter:
        @hookimpl
        def mstar_openai(self, spec):
            return {"chat": "mstar_server:NotThere"}

    hooks = kit.Hooks(NoRouters(), NoAdapter())
    async with kit.client(kit.Service(kit.HELLO), hooks=hooks) as client:
        assert (await client.post(CHAT, json=chat())).status_code == 200
    assert sorted(name for name, _ in hooks.plugins.rejected) == ["plugin0", "plugin1"]
    assert "NotThere" in dict(hooks.plugins.rejected)["plugin1"]
    assert "plugin1" in caplog.text


async def test_a_bug_in_a_route_is_a_500_of_the_contract(kit, caplog):

    class Plugin:
        @hookimpl
        def mstar_api(self, registry):
            router = APIRouter()

            @router.get("/broken")
            async def broken() -> None:
                raise ZeroDivisionError("secret detail")

            return [router]

    async with kit.client(kit.Service(), hooks=kit.Hooks(Plugin())) as client:
        reply = await client.get("/broken")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "secret detail" not in reply.text
    assert caplog.records[-1].args[0] in reply.json()["error"]["message"]
    assert f"ZeroDivisionError: secret detail (at {__file__}:" in caplog.records[-1].getMessage()


class BrokenAdapter:
    def __init__(self, spec, options):
        pass

    def tasks(self, body, media):
        return body["secret"]


async def test_a_bug_of_a_family_is_a_500_and_its_place_is_logged(kit, chat, caplog):
    """Its adapter, its processor (before the answer began) and its renderer (after)."""

    class Plugin:
        @hookimpl
        def mstar_openai(self, spec):
            return {"chat": f"{__name__}:BrokenAdapter"}

    service = kit.Service([TextDelta("a", (1,)), FaultFound("no rendering: secret (at owl.py:1)")])
    async with kit.client(service, hooks=kit.Hooks(Plugin())) as client:
        adapter = await client.post(CHAT, json=chat())
        renderer = await client.post("/generate", json={"text": "x"})
        late = await client.post("/generate", json={"text": "x", "streaming": True})
        service.refuse = FaultFound("no preparing: secret (at owl.py:2)")
        processor = await client.post("/generate", json={"text": "x"})
    for reply in (adapter, renderer, processor):
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 4
    for reply, record in zip((adapter, renderer, late, processor), errors, strict=True):
        assert "secret" not in reply.text
        assert __file__ not in reply.text
        assert record.args[0] in reply.text
        assert record.exc_info is not None
    said = [record.getMessage() for record in errors]
    assert said[0].startswith(f"unhandled error, id {errors[0].args[0]}: 'tiny' could not read a chat: TypeError: ")
    assert f"(at {__file__}:" in said[0]
    assert not any("MSTAR_LOG_LEVEL" in text for text in said), "the traceback is here already"
    assert said[1].endswith("no rendering: secret (at owl.py:1)")
    assert said[3].endswith("no preparing: secret (at owl.py:2)")


async def test_health_answers_three_questions(kit, chat):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        assert (await client.get("/health/ready")).json()["status"] == "ready"
        assert (await client.get("/health")).json()["models"]["tiny"]["worker"]["pools"] == {"kv": [0, 8]}
        service.phase = Phase(name="weights", progress=0.25, detail="shard 1 of 4")
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        report = (await client.get("/health")).json()
        refused = await client.post(CHAT, json=chat())
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
    assert ready.json()["models"]["tiny"] == {"phase": "weights", "progress": 0.25, "detail": "shard 1 of 4"}
    assert ready.json()["error"]["code"] == "not_ready"
    assert report == {"status": "not ready", "models": {"tiny": ready.json()["models"]["tiny"]}}
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "weights (25%)" in refused.json()["error"]["message"]


async def test_health_does_not_wait_for_a_worker_that_hangs(kit, monkeypatch):
    monkeypatch.setattr("mstar_server.routes.health.STATUS_TIMEOUT_S", 0.01)
    service = kit.Service()
    service.status = asyncio.Event().wait
    async with kit.client(service) as client:
        report = (await client.get("/health")).json()["models"]["tiny"]
    assert (report["worker"], report["worker_age_s"]) == (None, None)
    assert "did not answer" in report["detail"]


@pytest.mark.parametrize("asked", ["/health", "/metrics"])
async def test_during_a_long_step_health_says_what_was_known_before(kit, monkeypatch, asked):
    monkeypatch.setattr("mstar_server.routes.health.STATUS_TIMEOUT_S", 0.01)
    service = kit.Service()
    told, service.status = service.status, asyncio.Event().wait
    async with kit.client(service) as client:

        async def report():
            return (await client.get("/health")).json()["models"]["tiny"]

        service.status = told
        await client.get(asked)
        service.status = asyncio.Event().wait
        during = await report()
        later = await report()
        service.status = told
        after = await report()
        service.phase = Phase(name="starting")  # another worker
        await report()
        service.phase, service.status = Phase(name="ready"), asyncio.Event().wait
        other = await report()
    assert during["worker"] == after["worker"] == {"waiting": 0, "sessions": 0, "pools": {"kv": [0, 8]}}
    assert 0 < during["worker_age_s"] < later["worker_age_s"]
    assert "did not answer" in during["detail"]
    assert (after["worker_age_s"], after["detail"]) == (0, "")
    assert other["worker"] is None
