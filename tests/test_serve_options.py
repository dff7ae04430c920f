"""The options of ``mstar serve`` and the server's own settings say the same: the command line imports no server."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields

from mstar.cli import serve
from mstar.cli.commands import Parser
from mstar.cli.media_options import MEDIA_OPTIONS, media_options, size
from mstar_server.options import ServerOptions

DEFAULTS = {field.name: field.default for field in fields(ServerOptions)}


def actions(parser: Parser) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parser._actions if action.dest != "help"}


def told(action: argparse.Action) -> str | None:
    """The default that its help names, if it names a number or an address."""
    match = re.search(r"\(default: ([0-9][0-9.]*[A-Za-z]*|%\(default\)s)\)", action.help or "")
    return None if match is None else match[1].replace("%(default)s", str(action.default))


def test_limits_of_media_are_the_servers() -> None:
    parser = Parser(prog="serve")
    media_options(parser)
    assert actions(parser).keys() == set(MEDIA_OPTIONS)


def test_what_is_passed_on_is_the_servers_and_its_help_says_the_servers_defaults() -> None:
    parser = Parser(prog="serve")
    serve._arguments(parser)
    given = actions(parser)
    assert set(serve._PASSED_ON) <= given.keys() & DEFAULTS.keys()
    named = {name: default for name in serve._PASSED_ON if (default := told(given[name])) is not None}
    assert len(named) >= 15
    for name, default in named.items():
        known = DEFAULTS[name]
        assert (default if isinstance(known, str) else size(default)) == known, name
