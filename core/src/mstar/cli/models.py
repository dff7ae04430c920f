"""``mstar models``: what can be served, and what can be set of one model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json
from mstar.cli.output import bytes_in_words, note, print_json, table
from mstar.cli.plugins import note_broken
from mstar.registry import RegisteredModel
from mstar.runtime.deployment_files import packaged_deployment
from mstar.spec.fields import describe_fields
from mstar.spec.knobs import Knobs
from mstar.spec.model import ModelSpec

__all__ = ["needs_weights", "register", "weights_folder"]


def register(commands: Commands) -> None:
    """Add the command."""
    text = "List the models that the installed plugins serve; with a key, a model's knobs and options."
    commands.add("models", _run, help=text, arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help="list what requests and deployments may set of this model"
    )
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    if arguments.key is not None:
        return _show(context.registry.model(arguments.key), arguments.json, context)
    facts = [_facts(context.registry.models[key], context) for key in sorted(context.registry.models)]
    note_broken(context.plugins)
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


def _show(spec: ModelSpec, as_json: bool, context: Context) -> int:
    """Everything about one model: its facts, and the tables of what can be set."""
    facts = _facts(context.registry.models[spec.key], context)
    shipped = packaged_deployment(spec).get("model_kwargs") or {}
    found = {"knobs": _fields(spec.knobs, {}), "options": _fields(spec.options, shipped)}
    if as_json:
        print_json({**facts, **found, "layouts": dict(spec.layouts)})
        return 0
    print(f"{spec.key}: {spec.summary}")
    for title, rows in (("KNOB", found["knobs"]), ("OPTION", found["options"])):
        what = "parameters of a request" if title == "KNOB" else "model_kwargs of a deployment file"
        print(f"\n{what}:" if rows else f"\n{what}: none")
        if rows:
            print(table((title, "VALUE", "DEFAULT", "MEANING"), [tuple(row.values()) for row in rows]))
    if spec.layouts:
        print("\nlayouts that ship with it (--layout NAME, or layout: NAME in a deployment file):")
        print(table(("LAYOUT", "FILE"), list(spec.layouts.items())))
    return 0


def _fields(model: type[Knobs], defaults: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = describe_fields(model, inside=True, defaults=defaults)
    return [{k: v.replace("`", "") for k, v in row._asdict().items()} for row in rows]


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
