"""The server as an ASGI application that starts, drains and stops its own models: for a process of somebody else's,
such as a replica of Ray Serve.

What :mod:`mstar_server.run` does at the socket (limits of a request's head, a port that is open while models load) is
then that server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI

from mstar_server.app import create_app
from mstar_server.options import ServerOptions
from mstar_server.protocols import Registry, Service
from mstar_server.run import start_all, stop_all

__all__ = ["application"]


def application(services: Mapping[str, Service], registry: Registry, options: ServerOptions | None = None) -> FastAPI:
    """:func:`~mstar_server.app.create_app`'s application with a lifespan. Its startup ends when all *services* are
    ready, and raises :class:`~mstar.spec.errors.SetupError` when one cannot be. Its shutdown lets running requests go
    on for ``options.drain_s`` seconds."""
    options = options or ServerOptions()
    app = create_app(services, registry, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await start_all(services)
            yield
            app.state.mstar.draining = True
            await asyncio.gather(*(s.drain(options.drain_s) for s in services.values() if s.phase.name == "ready"))
        finally:
            await stop_all(services)
            await app.state.mstar.close()

    app.router.lifespan_context = lifespan
    return app
