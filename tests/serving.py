"""A real server on loopback, in a thread of the test process: sockets, uvicorn, services and workers are the real
ones."""

from __future__ import annotations

import asyncio
import gc
import importlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import httpx
import openai

from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.processors import present_processor
from mstar.runtime.service import open_service
from mstar.settings import Settings
from mstar_server.on_demand import Shelf
from mstar_server.options import ServerOptions
from mstar_server.run import bind, serve_async

__all__ = ["Server", "serving"]

_LAZY = (
    "mstar.worker.build",
    "mstar.cluster.inline",
    "mstar.engine.eager",
    "mstar.resources.paged_kv",
    "mstar.resources.recurrent",
    "mstar.resources.sampler",
    "mstar.resources.attention.torch_sdpa",
    "mstar.resources.attention.numba_cpu",
)


class Server:
    """Where it listens, and clients for it, which close with it."""

    def __init__(self, url: str):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def close(self) -> None:
        self.http.close()
        if "openai" in vars(self):
            self.openai.close()

    def pools(self) -> dict[str, dict[str, dict[str, int]]]:
        """Model → resource → usage, once every model is at rest."""
        deadline = time.monotonic() + 30
        while True:
            models = self.http.get("/health").json()["models"]
            workers = {key: m["worker"] for key, m in models.items()}
            # a worker in the middle of a long step has nothing to say
            if all(w is not None and w["running"] + w["waiting"] == 0 for w in workers.values()):
                return {key: w["resources"] for key, w in workers.items()}
            assert time.monotonic() < deadline, models
            time.sleep(0.01)


@contextmanager
def serving(
    *keys: str,
    extra_plugins: tuple[str, ...] = (),
    on_demand: tuple[str, ...] = (),
    server_options: Mapping[str, Any] | None = None,
    accept_licences: tuple[str, ...] = (),
    **overrides: object,
) -> Iterator[Server]:
    """Serve models *keys*, and *on_demand* ones, until the block ends. *overrides*: deployment fields."""
    settings = Settings(extra_plugins=extra_plugins, accept_licences=accept_licences)
    registry = Registry(load_plugins(settings))
    assert not registry.plugins.broken, registry.plugins.broken
    _import_all(registry, (*keys, *on_demand))
    options = ServerOptions(**{"port": 0, "drain_s": 5, **(server_options or {})})
    listener = bind(options)
    port = listener.getsockname()[1]
    failure: list[BaseException] = []

    def run() -> None:
        async def main() -> None:
            services: dict[str, Any] = {key: open_service(key, settings, overrides, registry) for key in keys}
            shelf = Shelf(options)
            for key in on_demand:
                make = partial(open_service, key, settings, overrides, registry)
                peek = partial(present_processor, key, settings, overrides, registry)
                services[key] = shelf.add(registry.model(key), make, peek)
            task = asyncio.create_task(serve_async(services, registry, options, listener))
            stopped = asyncio.create_task(asyncio.to_thread(stop.wait))
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            stop.set()
            await asyncio.gather(task, stopped, return_exceptions=True)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                failure.append(error)

        asyncio.run(main())

    stop = threading.Event()
    thread = threading.Thread(target=run, name="server")
    thread.start()
    server = Server(f"http://127.0.0.1:{port}")
    try:
        _wait_ready(server, failure)
        yield server
    finally:
        server.close()
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    if failure:
        raise failure[0]
    left = _left_open(port)
    assert not left, f"a test has not closed its client: {left}"


def _left_open(port: int) -> list[str]:
    """Sockets to *port* that nobody has closed: what the collector says of them."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    said = [str(warning.message) for warning in found]
    for other in (words for words in said if str(port) not in words):
        warnings.warn(other, ResourceWarning, stacklevel=1)
    return [words for words in said if f"raddr=('127.0.0.1', {port})" in words]


def _import_all(registry: Registry, keys: tuple[str, ...]) -> None:
    """What the models need, one module after the other: pytest parses the modules of its plugins, the core among them,
    when they are first imported, and Python 3.11 fails when two threads parse at once."""
    for name in _LAZY:
        importlib.import_module(name)
    for key in keys:
        spec = registry.model(key)
        load_object(spec.model)
        load_object(spec.processor)


def _wait_ready(server: Server, failure: list[BaseException]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not failure:
        try:
            if server.http.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"the server did not become ready: {failure}")
