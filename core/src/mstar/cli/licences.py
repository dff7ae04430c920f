"""``mstar license``: the terms of models' weights, and the operator's consent to them."""

from __future__ import annotations

import argparse
from typing import Any

from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.cli.options import note_unknown_licences, with_json
from mstar.cli.output import note, print_json, table
from mstar.licences import accept, accepted_by, read_acceptances, terms_of
from mstar.spec.errors import SetupError

__all__ = ["register"]

_ACTIONS = ("list", "show", "accept")


def register(commands: Commands) -> None:
    """Add the command, under both spellings."""
    text = "Show the licences of models' weights, and accept them."
    commands.add("license", _run, help=text, arguments=_arguments)
    commands.add("licence", _run, help="The same as `mstar license`.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("action", type=one_of(*_ACTIONS), metavar="list|show|accept", help="what to do")
    parser.add_argument("key", nargs="?", metavar="KEY", help="the model, for show and accept")
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    note_unknown_licences(context)
    if arguments.action == "list":
        if arguments.key is not None:
            raise SetupError("`mstar license list` takes no model; `mstar license show KEY` shows one")
        return _list(arguments, context)
    if arguments.key is None:
        raise SetupError(f"mstar license {arguments.action}: which model? (`mstar models` lists the keys)")
    context.registry.model(arguments.key)  # raises for an unknown key
    if arguments.action == "accept":
        _accept(arguments.key, context)
    return _show(arguments, context)


def _list(arguments: argparse.Namespace, context: Context) -> int:
    facts = [_facts(key, context) for key in sorted(context.registry.models)]
    if arguments.json:
        print_json(facts)
        return 0
    rows = [
        (f["key"], f["terms"], "yes" if f["commercial"] else "no", "yes" if f["gated"] else "no", _state(f), f["url"])
        for f in facts
    ]
    print(table(("KEY", "LICENCE", "COMMERCIAL", "GATED", "ACCEPTED", "TERMS"), rows))
    return 0


def _show(arguments: argparse.Namespace, context: Context) -> int:
    facts = _facts(arguments.key, context)
    if arguments.json:
        print_json(facts)
        return 0
    print(f"model:       {facts['key']}")
    print(f"licence:     {facts['terms']}")
    print(f"terms:       {facts['url'] or 'no link'}")
    print(f"commercial:  {'allowed' if facts['commercial'] else 'not allowed'}")
    print(f"gated:       {'yes: the place of the weights wants a token' if facts['gated'] else 'no'}")
    print(f"accepted:    {_state(facts)}")
    if facts["accepted"] is None:
        note(f"To accept: mstar license accept {facts['key']}")
    return 0


def _accept(key: str, context: Context) -> None:
    spec, plugin = context.registry.models[key]
    if spec.licence.permissive:
        note(f"the licence of {key!r} is permissive ({spec.licence.name}): there is nothing to accept")
        return
    accept(spec, plugin.name, plugin.version, context.settings)
    note(f"You have accepted the terms of the weights of {key!r}: {terms_of(spec)}.")


def _facts(key: str, context: Context) -> dict[str, Any]:
    spec = context.registry.models[key].spec
    by = accepted_by(spec, context.settings)
    record = read_acceptances(context.settings).get(key) if by == "record" else None
    return {
        "key": key,
        "terms": spec.licence.name,
        "url": spec.licence.url,
        "commercial": spec.licence.commercial,
        "gated": spec.licence.gated,
        "permissive": spec.licence.permissive,
        "accepted": by,
        "accepted_at": record.accepted_at if record else None,
        "accepted_version": record.version if record else None,
    }


def _state(facts: dict[str, Any]) -> str:
    match facts["accepted"]:
        case "permissive":
            return "not needed"
        case "settings":
            return "by MSTAR_ACCEPT_LICENCES"
        case "record":
            return f"{facts['accepted_at']} (version {facts['accepted_version']})"
        case _:
            return "no"
