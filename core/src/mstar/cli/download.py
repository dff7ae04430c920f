"""``mstar download KEY``: weights to this machine, without serving them."""

from __future__ import annotations

import argparse
from pathlib import Path

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import accepting, with_json, with_key, with_weights
from mstar.cli.output import note, print_json

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("download", _run, help="Fetch a model's weights, or show where they are.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_key(parser)
    with_weights(parser)
    parser.add_argument(
        "--accept-licence",
        action="store_true",
        help="accept the terms for this download (for good: `mstar license accept KEY`)",
    )
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    from mstar.cli.models import needs_weights
    from mstar.licences import check_licence
    from mstar.weights.progress import progress_bar
    from mstar.weights.sources import SourceContext, resolve_weights

    registry = context.registry
    spec = registry.model(arguments.key)
    settings = accepting(arguments, context)
    check_licence(spec, settings)
    with progress_bar() as progress:
        source = SourceContext.of(settings, say=note, progress=progress)
        folder = resolve_weights(spec, arguments.weights, registry.weight_source, source)
    if folder is None:
        where = "; name a folder or a Hub id with --weights" if needs_weights(spec) else ""
        note(f"the model {spec.key!r} has no published weights to fetch{where}")
    size = 0 if folder is None else _size(folder)
    if arguments.json:
        print_json({"key": spec.key, "folder": None if folder is None else str(folder), "size": size})
    elif folder is not None:
        print(folder)
    return 0


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
