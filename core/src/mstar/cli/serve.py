"""``mstar serve KEY…``: serve one model or several over HTTP.

The server is a distribution of its own that the core never imports by an import statement; it is looked up by name
here, and only here.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mstar.api_keys import DEFAULT_FILE
from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.cli.media_options import MEDIA_OPTIONS, media_options
from mstar.cli.options import accepting, count, engine_options, model_options, port, positive, positive_seconds, seconds
from mstar.licences import check_licence
from mstar.log_format import LOG_FORMATS, begin_logging
from mstar.registry import Registry, load_object
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar.spec.model import ModelSpec

__all__ = ["SERVER", "SERVER_OPTIONS", "register"]

SERVER = "mstar_server.run:serve"
SERVER_OPTIONS = "mstar_server.options:ServerOptions"

_PASSED_ON = (
    "host",
    "port",
    "max_key_requests",
    "key_requests_per_minute",
    "playground",
    "root_path",
    "drain_s",
    "state_dir",
    "load_wait_s",
    "idle_unload_s",
    "max_loaded",
    "log_stats",
    "otel",
    "video_timeout_s",
    "speech_ahead",
    *MEDIA_OPTIONS,
)
"""Arguments that are the server's options of the same name, where they are given."""


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("serve", _run, help="Serve models over HTTP.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "keys",
        nargs="*",
        metavar="KEY",
        help="the models; `mstar models` lists them; not needed where --config FILE names them",
    )
    parser.add_argument(
        "--on-demand", action="append", default=[], metavar="KEY", help="a model to load when it is first asked for"
    )
    parser.add_argument(
        "--idle-unload",
        type=_idle,
        dest="idle_unload_s",
        metavar="SECONDS",
        help="unload a model on demand that has had no request and no session for so long; 0: at once, -1: never "
        "(default)",
    )
    parser.add_argument(
        "--load-wait",
        type=seconds,
        dest="load_wait_s",
        metavar="SECONDS",
        help="how long a request waits for its model to load before it is answered 503 (default: 60)",
    )
    parser.add_argument(
        "--max-loaded", type=positive, metavar="N", help="models on demand that are loaded at once (default: all)"
    )
    model_options(parser, several=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, default=8000, help="port to listen on, 0 = any free one (default: %(default)s)"
    )
    parser.add_argument("--executor", help="how workers are started: processes (default), inline, ray, or a plugin's")
    parser.add_argument("--max-concurrent", type=positive, metavar="N", help="requests that run at once; others wait")
    parser.add_argument(
        "--request-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="how long a request may take, queue included",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="clients must send it (better: MSTAR_API_KEY, which `ps` does not show)"
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help=f"clients must send a key of this file (default: {DEFAULT_FILE} in MSTAR_CONFIG, once `mstar key add` has "
        "made it)",
    )
    parser.add_argument(
        "--max-key-requests",
        type=positive,
        metavar="N",
        help="requests that a key may have in flight (default: no limit)",
    )
    parser.add_argument(
        "--key-requests-per-minute",
        type=positive,
        metavar="N",
        help="requests that a key may begin a minute (likewise)",
    )
    parser.add_argument(
        "--cors",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin whose pages may use the server (https://app.example), * for all; can be repeated",
    )
    parser.add_argument(
        "--alias",
        type=_alias,
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="another name of a model, for clients that ask for somebody else's (tts-1=kokoro); can be repeated",
    )
    parser.add_argument(
        "--root-path",
        type=_root_path,
        metavar="PATH",
        help="the path below which a proxy shows the server, as in /mstar",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="where stored responses, uploaded voices and videos are kept, so that they outlive the server (default: "
        "memory and a temporary folder)",
    )
    media_options(parser)
    parser.add_argument(
        "--video-timeout",
        type=positive_seconds,
        dest="video_timeout_s",
        metavar="SECONDS",
        help="how long a video job may take, queue included (default: 21600)",
    )
    parser.add_argument(
        "--speech-ahead",
        type=count,
        metavar="N",
        help="pieces of a long text that are spoken beside the one that is heard (default: 2)",
    )
    parser.add_argument(
        "--log-format",
        type=one_of(*LOG_FORMATS),
        metavar="text|json",
        help="how log lines look (default: MSTAR_LOG_FORMAT, or text)",
    )
    parser.add_argument(
        "--log-stats",
        action="store_true",
        default=None,
        help="log a line for each request to a model, with where its time went",
    )
    parser.add_argument(
        "--otel", type=_collector, metavar="URL", help="send traces to this OpenTelemetry collector (OTLP over HTTP)"
    )
    parser.add_argument(
        "--no-playground",
        action="store_false",
        default=None,
        dest="playground",
        help="no page to try the models at /",
    )
    parser.add_argument(
        "--drain",
        type=seconds,
        dest="drain_s",
        metavar="SECONDS",
        help="how long requests may go on after SIGTERM (default: 30)",
    )


def _run(arguments: argparse.Namespace, context: Context) -> None:
    if arguments.log_format is not None:
        begin_logging(context.settings.log_level.upper(), arguments.log_format)
    keys = _distinct([*arguments.keys, *arguments.on_demand] or _named(arguments.config))
    settings, registry = accepting(arguments, context, *keys), context.registry
    configs = _configs(arguments, keys)
    specs = {key: _model(key, registry, configs.get(key)) for key in keys}
    for spec in specs.values():
        check_licence(spec, settings)  # before anything heavy is imported
    serve, make_options = _server()
    options = make_options(**_options(arguments, settings))
    makers = {
        spec.key: functools.partial(_open, key, arguments, settings, registry, configs.get(key))
        for key, spec in specs.items()
    }
    later = {
        specs[key].key: (
            specs[key],
            makers[specs[key].key],
            functools.partial(_processor, key, arguments, settings, registry, configs.get(key)),
        )
        for key in arguments.on_demand
    }
    now = {key: make() for key, make in makers.items() if key not in later}
    serve(now, registry, options, later)


def _named(files: Sequence[Path]) -> Sequence[str]:
    """The models that deployment *files* name."""
    from mstar.runtime.deployment_files import named_model

    return [named_model(file) for file in files]


def _distinct(keys: Sequence[str]) -> Sequence[str]:
    """*keys*, of which there must be some, and none twice."""
    if not keys:
        raise SetupError(
            "mstar serve: which model? Name its key (`mstar models` lists them), or a file that does with --config"
        )
    file = next((key for key in keys if key.endswith((".yaml", ".yml"))), None)  # `mstar check` takes one
    if file is not None:
        raise SetupError(f"mstar serve: {file!r} is no model but a file: `mstar serve --config {file}`")
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise SetupError(f"mstar serve: the model {twice!r} is named twice")
    return keys


def _configs(arguments: argparse.Namespace, keys: Sequence[str]) -> Mapping[str, Path]:
    """The deployment file of each model that has one: of several models, the one that the file names."""
    files: Sequence[Path] = arguments.config
    if len(keys) == 1 and len(files) <= 1:
        return dict(zip(keys, files, strict=False))
    for name, value in (
        ("--weights", arguments.weights),
        ("--layout", arguments.layout),
        ("--trace", arguments.trace),
    ):
        if value is not None and len(keys) > 1:
            raise SetupError(f"{name} is for one model; with several, put it into deployment files (--config FILE …)")
    from mstar.runtime.deployment_files import read_file

    configs: dict[str, Path] = {}
    for file in files:
        key = read_file(file).values.get("model")
        if key is None or key not in keys:
            known = ", ".join(keys)
            raise SetupError(
                f"{file}: with several models, 'model' must name one that is served ({known}), not {key!r}"
            )
        if key in configs:
            raise SetupError(f"{configs[key]} and {file} are both deployments of {key!r}")
        configs[key] = file
    return configs


def _options(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in _PASSED_ON if getattr(arguments, name) is not None}
    if given.get("idle_unload_s", 0.0) < 0:
        del given["idle_unload_s"]
    for name in ("cors", "media_hosts"):
        if getattr(arguments, name):
            given[name] = tuple(getattr(arguments, name))
    if arguments.alias:
        given["aliases"] = dict(arguments.alias)
    if "media_hosts" in given and not arguments.allow_remote_media:
        raise SetupError("--media-host says from where files are fetched: --allow-remote-media allows that they are")
    file = arguments.api_keys
    if file is None and (default := settings.config / DEFAULT_FILE).exists():
        file = default
    if file is not None:
        given["api_keys"] = file
    if settings.max_video_pixels is not None:
        given.setdefault("max_video_pixels", settings.max_video_pixels)
    return {**given, "api_key": arguments.api_key or settings.api_key}


def _model(key: str, registry: Registry, config: Path | None) -> ModelSpec:
    try:
        return registry.model(key)
    except SetupError:
        from mstar.runtime.opening import find_model  # imports torch: fine where nothing will be served

        return find_model(key, registry, config)


def _open(key: str, arguments: argparse.Namespace, settings: Settings, registry: Registry, config: Path | None) -> Any:
    from mstar.runtime.service import open_service  # imports numpy and zmq: only when a model is served

    return open_service(key, settings, _overrides(arguments), registry, config=config)


def _processor(
    key: str, arguments: argparse.Namespace, settings: Settings, registry: Registry, config: Path | None
) -> Any:
    """The processor of a model that is not loaded, if that takes no download."""
    from mstar.runtime.processors import present_processor

    return present_processor(key, settings, _overrides(arguments), registry, config=config)


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "weights": arguments.weights,
        "layout": arguments.layout,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "executor": arguments.executor,
        "max_concurrent_requests": arguments.max_concurrent,
        "request_timeout_s": arguments.request_timeout,
        **engine_options(arguments),
    }


def _server() -> tuple[Any, Any]:
    """The server's ``serve`` function and its options class."""
    try:
        return load_object(SERVER), load_object(SERVER_OPTIONS)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != SERVER.partition(".")[0]:
            raise  # the server is there, something that it needs is not: that is not this sentence
        raise SetupError("the HTTP server is not installed; run `pip install mstar-server`") from None


# --- values of options ---------------------------------------------------------------------------------------------


def _idle(value: str) -> float:
    return -1.0 if value.strip() in ("-1", "never", "none") else seconds(value)


def _origin(value: str) -> str:
    """An origin as browsers send it: scheme and host, perhaps a port, nothing behind."""
    parts = urlsplit(value)
    if value != "*" and (parts.scheme not in ("http", "https") or value != f"{parts.scheme}://{parts.netloc}"):
        raise argparse.ArgumentTypeError(f"{value!r} is not an origin such as https://app.example, nor *")
    return value


def _collector(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{value!r} is not a URL such as http://localhost:4318")
    return value


def _alias(value: str) -> tuple[str, str]:
    name, equals, key = value.rpartition("=")
    if not name or not equals or not key:
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME=KEY, as in tts-1=kokoro")
    return name, key


def _root_path(value: str) -> str:
    if not value.startswith("/") or "?" in value or "#" in value or value != value.strip():
        raise argparse.ArgumentTypeError(f"{value!r} is not a path such as /mstar")
    return value.rstrip("/")
