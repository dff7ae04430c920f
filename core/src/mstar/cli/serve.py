"""``mstar serve KEY``: serve one model over HTTP.

The server is a distribution of its own that the core never imports by an import statement; it is looked up by name
here, and only here.
"""

from __future__ import annotations

import argparse
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import accepting, engine_options, model_options, port, positive, with_key
from mstar.licences import check_licence
from mstar.registry import Registry, load_object
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar.spec.model import ModelSpec

__all__ = ["SERVER", "SERVER_OPTIONS", "register"]

SERVER = "mstar_server.run:serve"
SERVER_OPTIONS = "mstar_server.options:ServerOptions"


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("serve", _run, help="Serve a model over HTTP.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_key(parser)
    model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, default=8000, help="port to listen on, 0 = any free one (default: %(default)s)"
    )
    parser.add_argument("--executor", help="how workers are started: processes (default), inline, or a plugin's")
    parser.add_argument("--max-concurrent", type=positive, metavar="N", help="requests that run at once; others wait")
    parser.add_argument(
        "--api-key", metavar="KEY", help="clients must send it (better: MSTAR_API_KEY, which `ps` does not show)"
    )


def _run(arguments: argparse.Namespace, context: Context) -> None:
    settings, registry = accepting(arguments, context), context.registry
    spec = _model(arguments, registry)
    check_licence(spec, settings)  # before anything heavy is imported
    serve, make_options = _server()
    options = make_options(host=arguments.host, port=arguments.port, api_key=arguments.api_key or settings.api_key)
    serve({spec.key: _open(arguments, settings, registry)}, registry, options)


def _model(arguments: argparse.Namespace, registry: Registry) -> ModelSpec:
    try:
        return registry.model(arguments.key)
    except SetupError:
        from mstar.runtime.opening import find_model  # imports torch: fine where nothing will be served

        return find_model(arguments.key, registry, arguments.config)


def _open(arguments: argparse.Namespace, settings: Settings, registry: Registry) -> Any:
    from mstar.runtime.service import open_service  # imports numpy and zmq: only when a model is served

    overrides = {
        "weights": arguments.weights,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "executor": arguments.executor,
        "max_concurrent_requests": arguments.max_concurrent,
        **engine_options(arguments),
    }
    return open_service(arguments.key, settings, overrides, registry, config=arguments.config)


def _server() -> tuple[Any, Any]:
    """The server's ``serve`` function and its options class."""
    try:
        return load_object(SERVER), load_object(SERVER_OPTIONS)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != SERVER.partition(".")[0]:
            raise  # the server is there, something that it needs is not: that is not this sentence
        raise SetupError("the HTTP server is not installed; run `pip install mstar-server`") from None
