"""``mstar graph KEY``: a model's nodes, walks, partitions, streams and placement, as text or as a picture."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json, with_key, with_layout
from mstar.cli.output import Tree, fault, note, print_json
from mstar.plugin_code import quiet
from mstar.spec.errors import SetupError, counted
from mstar.spec.placement import Seat

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("graph", _run, help="Show a model's dataflow, as text or SVG.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_key(parser, or_config=True)
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment file (YAML)")
    with_layout(parser)
    parser.add_argument(
        "--weights", metavar="DIR|HUB_ID[@REVISION]", help="where the model's configuration is; nothing is fetched"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the graph into FILE")
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    if arguments.key is not None:
        spec = context.registry.model(arguments.key)
    elif arguments.config is None:
        raise SetupError("mstar graph: which model? Name its key, or a deployment file that does with --config")
    from mstar.cli.graph_facts import graph_facts
    from mstar.runtime.checking import check_model, model_of_file  # imports torch

    if arguments.key is None:
        spec = model_of_file(arguments.config, context.registry)

    with quiet():
        checked = check_model(
            spec,
            context.settings,
            context.registry,
            config=arguments.config,
            layout=arguments.layout,
            weights=arguments.weights,
        )
    if checked.graph is None or checked.deployment is None:
        fault("\n".join(str(found) for found in checked.faults))
        return 1
    facts = graph_facts(spec.key, checked.graph, checked.declared, checked.deployment)
    if arguments.svg is not None:
        _draw(facts, arguments.svg)
    if arguments.json:
        print_json(facts)
    elif arguments.svg is None:
        _print(facts)
    if checked.faults:
        fault(f"{counted(len(checked.faults), 'fault')}: `{_check_command(arguments)}` lists what is wrong")
    return 1 if checked.faults else 0


def _check_command(arguments: argparse.Namespace) -> str:
    """What to type to check just what was drawn."""
    words = ["mstar", "check"] if arguments.key is None else ["mstar", "check", arguments.key]
    for option in ("config", "layout", "weights"):
        value = getattr(arguments, option)
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words)


def _draw(facts: dict[str, Any], file: Path) -> None:
    from mstar.cli.graph_svg import draw

    try:
        file.write_text(draw(facts), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"the picture cannot be written: {error}") from None
    note(f"drawn into {file}")


def _print(facts: dict[str, Any]) -> None:
    copies = facts["replicas"]
    tree = Tree(facts["key"] if copies == 1 else f"{facts['key']}, {copies} copies of the layout")
    _add_nodes(tree.add("nodes"), facts)
    for partition in facts["partitions"]:
        branch = tree.add(f"partition {partition['name']}")
        for name in partition["walks"]:
            _add_walk(branch.add(f"walk {name}"), facts["walks"][name])
    streams = tree.add("streams")
    for s in facts["streams"]:
        clock = f", {s['seconds_per_item']} s each" if s["seconds_per_item"] else ""
        streams.add(f"{s['name']}: {s['source']} → {s['target']} ({s['modality']}, {s['chunk']}{clock})")
    resources = tree.add("resources")
    for name, fields in facts["resources"].items():
        shown = ", ".join(f"{k}={v}" for k, v in fields.items() if k != "kind" and v not in (None, {}, ()))
        kept = " [kept by sessions]" if name in facts["sessions"] else ""
        resources.add(f"{name}: {fields['kind']}" + (f" ({shown})" if shown else "") + kept)
    print("\n".join(tree.lines()))


def _add_nodes(tree: Tree, facts: dict[str, Any]) -> None:
    for node in facts["nodes"]:
        seats = _seats(node["seats"])
        if node["places"]:
            seats = ", then ".join(f"{_seats(there)} for {part}" for part, there in node["places"].items())
        if node["split"] == "contexts" and len(node["seats"]) > 1:
            seats += ", contexts apart"
        rows = f", at most {node['max_rows']} rows a step" if node["max_rows"] else ""
        branch = tree.add(f"{node['name']} on {seats}{rows}")
        for entry in node["entries"]:
            inputs, outputs = (", ".join(map(_port, entry[side])) for side in ("inputs", "outputs"))
            uses = f" using {', '.join(entry['resources'])}" if entry["resources"] else ""
            branch.add(f"{entry['name']}({inputs}) → {outputs or 'nothing'}{uses}")


def _seats(seats: list[dict[str, Any]]) -> str:
    return " and ".join(str(Seat(tuple(seat["ranks"]), seat["tp"], seat["sp"])) for seat in seats)


def _port(port: dict[str, Any]) -> str:
    shape = ",".join(map(str, port["shape"]))
    return f"{port['name']}{'?' if port['optional'] else ''}: {port['dtype']}[{shape}]"


def _add_walk(tree: Tree, walk: dict[str, Any]) -> None:
    match walk["kind"]:
        case "call":
            tree.add(_call(walk))
        case "loop":
            _add_walk(tree.add(f"repeat until {' or '.join(walk['until'])}"), walk["body"])
        case "draft":
            _add_walk(tree.add(f"draft, taken back from {', '.join(walk['resources'])}"), walk["body"])
        case kind:
            branch = tree.add("one after the other" if kind == "seq" else "side by side")
            for part in walk["parts"]:
                _add_walk(branch, part)


def _call(call: dict[str, Any]) -> str:
    name = call["node"] if call["entry"] == "forward" else f"{call['node']}.{call['entry']}"
    inputs = ", ".join(f"{port} = {source}" for port, source in call["inputs"].items())
    results = [*call["outputs"].values(), *(f"stream {name}" for name in call["emit"].values())]
    context = "" if call["context"] == "main" else f" in context {call['context']}"
    return f"{name}({inputs}) → {', '.join(dict.fromkeys(results)) or 'nothing'}{context}"
