"""The options of ``mstar serve`` and the server's own settings say the same: the command line imports no server."""

from __future__ import annotations

import re
from dataclasses import fields

from mstar.cli.commands import Parser
from mstar.cli.media_options import MEDIA_OPTIONS, media_options, size
from mstar_server.options import ServerOptions


def test_limits_of_media_are_the_servers_and_their_help_says_its_defaults() -> None:
    parser = Parser(prog="serve")
    media_options(parser)
    defaults = {field.name: field.default for field in fields(ServerOptions)}
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert actions.keys() == set(MEDIA_OPTIONS)
    assert actions.keys() <= defaults.keys()
    told = {name: re.search(r"\(default: ([0-9.]+[A-Za-z]*)\)", action.help or "") for name, action in actions.items()}
    assert sum(match is not None for match in told.values()) >= 10
    for name, match in told.items():
        if match is not None:
            assert size(match[1]) == defaults[name], name
