"""The server as an ASGI application of somebody else's process: it starts, drains and stops its models."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.service import Service, open_service
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar_server.asgi import application
from mstar_server.options import ServerOptions

SETTINGS = Settings(plugins=("server",), extra_plugins=("mstar.testing.miniatures",))


def service(registry: Registry, **overrides: Any) -> Service:
    return open_service("mini_chat", SETTINGS, {"executor": "inline", **overrides}, registry)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(load_plugins(SETTINGS))


def test_models_live_as_long_as_the_application(registry: Registry) -> None:
    model = service(registry)
    body = {"model": "mini_chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    with TestClient(application({"mini_chat": model}, registry)) as client:
        assert client.get("/health/ready").status_code == 200
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] > 0
    assert model.phase.name == "stopped"


def test_a_model_that_cannot_start_ends_the_startup(registry: Registry) -> None:
    app = application({"mini_chat": service(registry, resources={"kv": {"tokens": 0}})}, registry)
    with pytest.raises(SetupError, match="holds 0 pages"), TestClient(app):
        pass


def test_the_shutdown_waits_for_what_runs(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drained = service(registry), threading.Event()
    drain = model.drain

    async def watched(seconds: float) -> None:
        assert seconds == 7
        await drain(seconds)
        drained.set()

    monkeypatch.setattr(model, "drain", watched)
    app = application({"mini_chat": model}, registry, ServerOptions(drain_s=7))
    with TestClient(app) as client:
        assert client.get("/health/ready").status_code == 200
    assert app.state.mstar.draining
    assert drained.is_set()
