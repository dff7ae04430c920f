"""The application: routers from every plugin, one error contract, the keys, the limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware

from mstar.spec.errors import SetupError
from mstar_server import __version__
from mstar_server.errors import ErrorMiddleware, install_handlers
from mstar_server.exchange import ID_HEADER, ExchangeLife
from mstar_server.hooks import routers
from mstar_server.json_body import check_json
from mstar_server.middleware import BodyLimit, KeyCheck, KeyRing, RootPath
from mstar_server.observe.tracing import Tracing, open_tracing
from mstar_server.openapi import ERRORS, with_errors
from mstar_server.options import ServerOptions
from mstar_server.protocols import Registry, Service
from mstar_server.routes import playground
from mstar_server.state import ServerState

__all__ = ["create_app"]


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return with_errors(super().openapi())


def create_app(
    services: Mapping[str, Service],
    registry: Registry,
    options: ServerOptions | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """An application that serves *services* by key. It neither starts nor stops them: :mod:`mstar_server.run` does.

    Routers come from the ``mstar_api`` hook of every plugin, the server's own among them.

    :param tracing: where traces go; default: to ``options.otel``, if that is set.
    :raises SetupError: no plugin that is used has routes.
    """
    options = options or ServerOptions()
    if tracing is None and options.otel is not None:
        tracing = open_tracing(options.otel)
    app = _Application(title="M*", version=__version__, redoc_url=None)
    state = app.state.mstar = ServerState(services, registry, options, tracing)
    found = routers(registry)
    if not found:
        raise SetupError(
            "no plugin that is used has routes, not even for health: let 'server' (mstar_server.plugin) be among those "
            "that MSTAR_PLUGINS names, or name its module in MSTAR_EXTRA_PLUGINS; 'mstar plugins' lists what is used"
        )
    mounted = [*found, *([playground.make_router()] if options.playground else [])]
    for router in mounted:
        app.include_router(router, dependencies=[Depends(check_json)], responses=ERRORS)
    state.mounted = frozenset(
        path for router in mounted for route in router.routes if (path := getattr(route, "path", None))
    )
    install_handlers(app)
    # The last added is the outermost: a request passes its life's watch, the error net, the key, the size. A preflight
    # of a browser has neither key nor body and is answered before any of them.
    app.add_middleware(BodyLimit, limit=options.max_body_bytes)
    if options.api_key is not None or options.api_keys is not None:
        app.add_middleware(KeyCheck, ring=KeyRing(options.api_key, options.api_keys), page=options.playground)
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(ExchangeLife, book=state.exchanges, watcher=state.observer)
    if options.root_path:
        app.add_middleware(RootPath, path=options.root_path)
    if options.cors:
        shown = [ID_HEADER, "Retry-After"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=shown,
        )
    return app
