"""``mstar models``: what can be served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json
from mstar.cli.output import bytes_in_words, note, print_json, table
from mstar.registry import RegisteredModel
from mstar.spec.model import ModelSpec

__all__ = ["needs_weights", "register", "weights_folder"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("models", _run, help="List the models that the installed plugins serve.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    facts = [_facts(context.registry.models[key], context) for key in sorted(context.registry.models)]
    for broken in context.plugins.broken:
        note(str(broken))
    if arguments.json:
        print_json(facts)
    elif facts:
        head = ("KEY", "FAMILY", "ABILITIES", "MODALITIES", "LICENCE", "SIZE", "PLUGIN", "WEIGHTS", "SUMMARY")
        print(table(head, [_row(fact) for fact in facts]))
    else:
        note("no installed plugin provides a model; try `pip install mstar-demo`")
    return 0


def weights_folder(key: str, context: Context) -> Path | None:
    """Where the weights of model *key* are on this machine; nothing is fetched."""
    from mstar.weights.sources import SourceContext, present_weights

    sources = context.registry.weight_source
    return present_weights(context.registry.model(key), None, sources, SourceContext.of(context.settings))


def needs_weights(spec: ModelSpec) -> bool:
    """Whether *spec*'s model has weights at all: published ones, or a tiny checkpoint that stands for them."""
    return bool(spec.weights) or spec.tiny is not None


def _facts(model: RegisteredModel, context: Context) -> dict[str, Any]:
    spec = model.spec
    folder = weights_folder(spec.key, context)
    return {
        "key": spec.key,
        "family": spec.family,
        "summary": spec.summary,
        "plugin": model.plugin.name,
        "plugin_version": model.plugin.version,
        "weights": [{"source": w.source, "id": w.id, "revision": w.revision} for w in spec.weights],
        "weights_present": folder is not None or not needs_weights(spec),
        "weights_folder": None if folder is None else str(folder),
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


def _row(fact: dict[str, Any]) -> tuple[str, ...]:
    if fact["weights_present"]:
        weights = "none needed" if fact["weights_folder"] is None else "present"
    else:
        weights = "not yet" if fact["weights"] else "give --weights"
    return (
        fact["key"],
        fact["family"],
        ",".join(fact["abilities"]),
        f"{'+'.join(fact['inputs'])} → {'+'.join(fact['outputs'])}",
        fact["licence"]["name"],
        "?" if fact["size"] is None else bytes_in_words(fact["size"]),
        f"{fact['plugin']} {fact['plugin_version']}",
        weights,
        fact["summary"],
    )
