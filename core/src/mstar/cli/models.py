"""``mstar models``: what can be served."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.output import note, table
from mstar.registry import RegisteredModel

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("models", _run, help="List the models that the installed plugins serve.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _run(arguments: argparse.Namespace, context: Context) -> int:
    models = [context.registry.models[key] for key in sorted(context.registry.models)]
    for broken in context.plugins.broken:
        note(str(broken))
    if arguments.json:
        print(json.dumps([_facts(model) for model in models], indent=2))
    elif models:
        rows = [
            (m.spec.key, _size(m.spec.size), m.spec.licence.name, ", ".join(m.spec.abilities), m.spec.summary)
            for m in models
        ]
        print(table(("KEY", "SIZE", "LICENCE", "ABILITIES", "SUMMARY"), rows))
    else:
        note("no installed plugin provides a model; try `pip install mstar-demo`")
    return 0


def _facts(model: RegisteredModel) -> dict[str, Any]:
    spec = model.spec
    return {
        "key": spec.key,
        "family": spec.family,
        "summary": spec.summary,
        "plugin": model.plugin.name,
        "plugin_version": model.plugin.version,
        "weights": [{"source": w.source, "id": w.id, "revision": w.revision} for w in spec.weights],
        "size": spec.size,
        "licence": {
            "name": spec.licence.name,
            "url": spec.licence.url,
            "commercial": spec.licence.commercial,
            "gated": spec.licence.gated,
            "permissive": spec.licence.permissive,
        },
        "abilities": list(spec.abilities),
        "inputs": list(spec.inputs),
        "outputs": list(spec.outputs),
    }


def _size(size: int | None) -> str:
    if size is None:
        return "?"
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
