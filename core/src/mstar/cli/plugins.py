"""``mstar plugins``: what is loaded, what is not, and why."""

from __future__ import annotations

import argparse
import json
import traceback
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.output import table
from mstar.plugins import Plugins

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("plugins", _run, help="List the plugins, those that do not work included.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--traceback", action="store_true", help="show where broken plugins failed")


def _run(arguments: argparse.Namespace, context: Context) -> int:
    registry = context.registry  # building it finds the plugins whose hooks return the wrong thing
    facts = _facts(registry.plugins)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        rows = [
            (fact["name"], fact["version"], fact["state"], fact["reason"] or ", ".join(fact["hooks"])) for fact in facts
        ]
        print(table(("NAME", "VERSION", "STATE", "HOOKS OR REASON"), rows))
    if arguments.traceback:
        for broken in registry.plugins.broken:
            if broken.error:
                print(f"\n{broken.name}:\n" + "".join(traceback.format_exception(broken.error)), end="")
    return 0


def _facts(plugins: Plugins) -> list[dict[str, Any]]:
    loaded = [_fact(p.name, p.version, "loaded", hooks=plugins.hooks(p), source=p.source) for p in plugins.loaded]
    broken = [_fact(p.name, p.version, "broken", reason=p.reason) for p in plugins.broken]
    return [*loaded, *broken, *(_fact(name, "", "blocked", reason="by the settings") for name in plugins.blocked)]


def _fact(name: str, version: str, state: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "version": version, "state": state, "reason": None, "hooks": [], "source": None} | more
