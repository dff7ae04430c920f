"""The ``mstar`` command. Starting it imports no torch: a command imports what it needs when it runs."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import mstar
from mstar.cli.commands import Command, Commands, Context, Parser
from mstar.cli.output import fault, note, table, tolerate_encodings
from mstar.cli.plugins import note_broken
from mstar.plugin_code import Interrupted
from mstar.plugins import Plugins, load_plugins
from mstar.settings import Settings
from mstar.spec.errors import FaultFound, PluginError, SetupError

__all__ = ["Command", "Commands", "Context", "main", "run"]


def main() -> None:
    """The console script. Exit status: 0; 1 when a fault was found in a model, its deployment or its code, or the
    output cannot be written; 2 when the command cannot be carried out as it was typed; 130 when interrupted; 141 when
    whoever read the output has left."""
    tolerate_encodings()
    try:
        status = run(sys.argv[1:], os.environ)
        sys.stdout.flush()
    except BrokenPipeError:
        status = _give_up_output(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = _give_up_output(1)
        fault("the output cannot be written: no space is left there", colour="NO_COLOR" not in os.environ)
    sys.exit(status)


def _give_up_output(status: int) -> int:
    """Let what is still buffered go nowhere: the interpreter writes it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command line *words* and return the exit status. A :class:`SetupError` becomes a sentence on stderr; any
    other exception is a bug and keeps its traceback."""
    try:
        return _run(list(words), environ)
    except SetupError as error:
        fault(str(error), colour="NO_COLOR" not in environ)
        return 1 if isinstance(error, FaultFound) or _is_broken_plugin(error) else 2
    except Interrupted as interrupted:
        fault(f"interrupted {interrupted}".rstrip(), colour="NO_COLOR" not in environ)
        return 130
    except KeyboardInterrupt:
        return 130


def _is_broken_plugin(error: SetupError) -> bool:
    """Whether *error* is about a plugin that failed, and not about one that is left out or not there."""
    return isinstance(error, PluginError) and error.__cause__ is not None


def _run(words: list[str], environ: Mapping[str, str]) -> int:
    if words and words[0] in ("--version", "-V"):
        print(f"mstar {mstar.__version__}")
        return 0
    settings = Settings.from_env(environ)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(
        max(logging.WARNING, logging.getLogger().level)
    )  # it tells our own story twice
    plugins = load_plugins(settings, remember=True)
    for sentence in plugins.unknown.values():
        note(sentence, colour="NO_COLOR" not in environ)
    commands = collect(plugins)
    if not words or words[0] in ("--help", "-h", "help"):
        print(_overview(commands))
        note_broken(plugins, colour="NO_COLOR" not in environ)
        return 0
    if words[0].startswith("-"):
        Parser(prog="mstar").parse(words)  # raises: names the nearest of mstar's own options
    command = commands.find(words[0])
    arguments = command.parser().parse(words[1:])
    return command.run(arguments, Context(settings, plugins)) or 0


def collect(plugins: Plugins) -> Commands:
    """Ask every plugin for its commands. One whose command cannot be added is put aside, with all of its commands."""
    commands = Commands()
    for plugin in tuple(plugins.loaded):
        own = Commands()
        try:
            plugins.call(plugin, "mstar_cli", commands=own)
            commands.merge(own.by_name.values())
        except SetupError as error:
            plugins.reject(plugin, error)
    return commands


def _overview(commands: Commands) -> str:
    rows = [(f"  {name}", command.help) for name, command in commands.by_name.items()]
    return (
        "usage: mstar COMMAND …\n\nServe generative multimodal models.\n\n"
        + table(("commands:", ""), rows)
        + "\n\n`mstar COMMAND --help` shows what a command takes; `mstar --version` the version."
    )
