"""``mstar plugins``: what is loaded, what is not, why, and what to do about it."""

from __future__ import annotations

import argparse
import traceback
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json
from mstar.cli.output import note, print_json, table
from mstar.plugins import BrokenPlugin, Plugins

__all__ = ["note_broken", "register", "remedy"]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("plugins", _run, help="List the plugins, those that do not work included.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_json(parser)
    parser.add_argument("--traceback", action="store_true", help="show where broken plugins failed")


def _run(arguments: argparse.Namespace, context: Context) -> int:
    registry = context.registry  # building it finds the plugins whose hooks return the wrong thing
    facts = _facts(registry.plugins)
    if arguments.json:
        if not arguments.traceback:
            facts = [{name: value for name, value in fact.items() if name != "traceback"} for fact in facts]
        print_json(facts)
        return 0
    rows = [(fact["name"], fact["version"], fact["state"], _detail(fact)) for fact in facts]
    print(table(("NAME", "VERSION", "STATE", "HOOKS OR REASON"), rows))
    for fact in facts:
        if fact["remedy"]:
            print(f"\n{fact['name']}: {fact['remedy']}")
        if arguments.traceback and fact["traceback"]:
            print(f"\n{fact['name']}:\n{fact['traceback']}", end="")
    return 0


def _detail(fact: dict[str, Any]) -> str:
    return fact["reason"] or ", ".join(fact["hooks"])


def _facts(plugins: Plugins) -> list[dict[str, Any]]:
    loaded = [_fact(p.name, p.version, "loaded", hooks=plugins.hooks(p), source=p.source) for p in plugins.loaded]
    broken = [
        _fact(p.name, p.version, "broken", reason=p.reason, remedy=remedy(p), traceback=_traceback(p.error))
        for p in plugins.broken
    ]
    return [*loaded, *broken, *(_fact(name, "", "blocked", reason="by the settings") for name in plugins.blocked)]


def _fact(name: str, version: str, state: str, **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"reason": None, "remedy": None, "hooks": [], "source": None, "traceback": None}
    return {"name": name, "version": version, "state": state, **empty, **more}


def _traceback(error: BaseException | None) -> str | None:
    return "".join(traceback.format_exception(error)) if error else None


def note_broken(plugins: Plugins, *, colour: bool = True) -> None:
    """Say on stderr what is not used and why, without what every command says (``plugins.unknown``)."""
    for broken in plugins.broken:
        if ("MSTAR_PLUGINS", broken.name) not in plugins.unknown:
            note(str(broken), colour=colour)


def remedy(plugin: BrokenPlugin) -> str:
    """What to type or to change so that *plugin* works, or stops to be mentioned."""
    error = plugin.error
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"`pip install {package}` (or the package that provides module {package!r}) may be all that it lacks"
    return plugin.remedy
