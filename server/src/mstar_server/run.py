"""From services to a listening server: start-up phases, signals, draining, stop.

The port is open at once: while models load, ``/health/live`` answers 200, ``/health/ready`` 503 with the phase, and
every request 503 with ``Retry-After``. At SIGTERM (or the first SIGINT) new requests get 503 while running ones go on
for at most ``options.drain_s``; a second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import socket
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from mstar.collector import settle
from mstar.runtime.telling import tell_phases
from mstar.spec.errors import SetupError
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Processor
from mstar_server.app import create_app
from mstar_server.exchange import name_log_lines
from mstar_server.http_protocol import BoundedHttp
from mstar_server.on_demand import Shelf
from mstar_server.options import ServerOptions
from mstar_server.protocols import Registry, Service
from mstar_server.state import ServerState

__all__ = ["bind", "serve", "serve_async", "start_all", "stop_all"]

log = logging.getLogger("mstar.server")

FLUSH_S = 5
"""How long connections may take to send out what was answered, once all requests have ended."""

TELL_S = 5.0
"""How often a start says what it waits for."""


def serve(
    services: Mapping[str, Service],
    registry: Registry,
    options: ServerOptions | None = None,
    on_demand: Mapping[str, tuple[ModelSpec, Callable[[], Service], Callable[[], Processor | None]]] | None = None,
) -> None:
    """Serve until a signal. Starts and stops *services*. Raises :class:`SetupError` when the port or a model fails.

    :param on_demand: models that are loaded when they are first asked for: as for
        :meth:`~mstar_server.on_demand.Shelf.add`.
    """
    options = options or ServerOptions()
    shelf = Shelf(options)
    later = {key: shelf.add(*facts) for key, facts in (on_demand or {}).items()}
    name_log_lines()
    listener = bind(options)
    thresholds = gc.get_threshold()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve_async({**services, **later}, registry, options, listener, settle))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def serve_async(
    services: Mapping[str, Service],
    registry: Registry,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """:func:`serve` on a running loop and an open *listener*, which is closed at the end.

    :param on_ready: called when all models have started.
    """
    try:
        app = create_app(services, registry, options)
    except BaseException:
        listener.close()
        raise
    if options.api_key is None and options.api_keys is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("no API key is asked for: whoever reaches %s may use this server", options.host)
    server = _Server(_uvicorn_config(app, options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    starting = asyncio.create_task(start_all(services))
    telling = asyncio.create_task(tell_phases(app.state.mstar.resident, log, TELL_S))
    stopping = asyncio.create_task(server.stop_asked.wait())
    try:
        await asyncio.wait((serving, starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not serving.done():
            telling.cancel()
            starting.result()  # raises what kept a model from starting
            on_ready()
            log.info("ready on http://%s:%d: %s", host, port, ", ".join(services))
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await _drain(app, services, server, options.drain_s)
    finally:
        for task in (starting, stopping, telling):
            task.cancel()
        await asyncio.gather(starting, stopping, telling, return_exceptions=True)
        try:
            await stop_all(services)
        finally:
            server.should_exit = True
            await serving
            await app.state.mstar.close()


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket. Raises :class:`SetupError` when the address is taken or unknown."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise SetupError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; "
            "--port N takes another port, 0 any free one"
        ) from None
    return listener


async def start_all(services: Mapping[str, Service]) -> None:
    """Start every model; the first that fails ends the start."""
    try:
        async with asyncio.TaskGroup() as group:
            for service in services.values():
                group.create_task(service.start())
    except* SetupError as errors:
        first, *others = _leaves(errors)
        raise SetupError("\n".join(map(str, (first, *others)))) if others else first from None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _drain(app: FastAPI, services: Mapping[str, Service], server: _Server, seconds: float) -> None:
    """Refuse what is new and wait for what runs: at most *seconds*, or until a second signal."""
    state: ServerState = app.state.mstar
    state.draining = True
    log.info("stopping: running requests may go on for %g s; Ctrl-C again stops at once", seconds)
    draining = asyncio.gather(
        *(service.drain(seconds) for service in services.values() if service.phase.name == "ready")
    )
    hurried = asyncio.create_task(server.hurry_asked.wait())
    try:
        await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            draining.result()
    finally:
        draining.cancel()
        hurried.cancel()
        await asyncio.gather(draining, hurried, return_exceptions=True)


async def stop_all(services: Mapping[str, Service]) -> None:
    """Stop every model, whatever becomes of the others; then raise what the first that failed raised."""
    results = await asyncio.gather(*(service.stop() for service in services.values()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class _Server(uvicorn.Server):
    """uvicorn, but a signal asks us to drain while it still answers; its own shutdown comes after that."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.stop_asked, self.hurry_asked = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # a signal handler runs between any two instructions: leave the events to the loop
        self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry_asked if self.stop_asked.is_set() else self.stop_asked).set()


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for Windows
        return None
    return uvloop.Loop


def _uvicorn_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    protocol: Any = functools.partial(
        BoundedHttp,
        max_head_bytes=options.max_head_bytes,
        head_timeout_s=options.head_timeout_s,
        body_timeout_s=options.body_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=protocol,
        ws="websockets-sansio",
        ws_max_size=4 * options.max_socket_message_bytes,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FLUSH_S,
    )
