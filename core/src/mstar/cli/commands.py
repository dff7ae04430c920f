"""Commands and how their arguments are read: argparse, with faults that name the nearest right word."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from mstar.plugins import Plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import SetupError, nearest

__all__ = ["Command", "Commands", "Context", "Parser", "one_of"]


@dataclass(frozen=True)
class Context:
    """What a command works with. *registry* is built when it is first asked for."""

    settings: Settings
    plugins: Plugins

    @cached_property
    def registry(self) -> Registry:
        return Registry(self.plugins)


class Parser(argparse.ArgumentParser):
    """An argument parser whose faults are :class:`SetupError` sentences. Options are never abbreviated."""

    def __init__(self, **options: Any):
        self._known: list[str] = []
        super().__init__(allow_abbrev=False, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse's; remembers the options' names, to suggest them."""
        action = super().add_argument(*names, **options)
        self._known.extend(s for s in action.option_strings if s.startswith("--"))
        return action

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of *words*.

        :raises SetupError: one is unknown, missing or not valid.
        """
        parsed, unknown = self.parse_known_args(words)
        if not unknown:
            return parsed
        word = unknown[0].partition("=")[0]
        if word.startswith("-"):
            raise SetupError(f"{self.prog}: unknown option {word!r}{nearest(word, self._known)}")
        raise SetupError(f"{self.prog}: unexpected argument {word!r} (`{self.prog} --help` shows the usage)")

    def error(self, message: str) -> NoReturn:
        """argparse calls this for a fault that it found."""
        raise SetupError(f"{self.prog}: {message} (`{self.prog} --help` shows the usage)")


def one_of(*choices: str) -> Callable[[str], str]:
    """An argparse ``type`` that accepts *choices* and names the nearest one for anything else."""

    def convert(value: str) -> str:
        if value not in choices:
            raise argparse.ArgumentTypeError(f"{value!r} is not a valid value{nearest(value, choices)}")
        return value

    return convert


def _no_arguments(parser: Parser) -> None:
    del parser


@dataclass(frozen=True)
class Command:
    """One sub-command. *run* gets the parsed arguments and returns the exit status (``None`` = 0)."""

    name: str
    run: Callable[[argparse.Namespace, Context], int | None]
    help: str
    arguments: Callable[[Parser], None] = _no_arguments

    def parser(self) -> Parser:
        """A parser of this command's own arguments."""
        parser = Parser(prog=f"mstar {self.name}", description=self.help)
        self.arguments(parser)
        return parser


@dataclass
class Commands:
    """The sub-commands of ``mstar``. A plugin gets this object in the hook ``mstar_cli`` and adds its own::

    @mstar.hookimpl
    def mstar_cli(commands):
        commands.add("hello", run_hello, help="Say hello.", arguments=lambda parser: parser.add_argument("name"))
    """

    by_name: dict[str, Command] = field(default_factory=dict)

    def add(
        self,
        name: str,
        run: Callable[[argparse.Namespace, Context], int | None],
        *,
        help: str,  # noqa: A002 - argparse's word
        arguments: Callable[[Parser], Any] = _no_arguments,
    ) -> None:
        """Add a sub-command.

        :param run: called with the parsed arguments and a :class:`Context`; returns the exit status (``None`` = 0).
        :param help: one sentence.
        :param arguments: called with an ``argparse`` parser to declare what the command takes.
        :raises SetupError: the name is taken.
        """
        self.merge([Command(name, run, help, arguments)])

    def merge(self, commands: Iterable[Command]) -> None:
        """Add all of *commands*, or none if a name is taken (:class:`SetupError`)."""
        new = list(commands)
        for command in new:
            if command.name in self.by_name:
                raise SetupError(f"the command `mstar {command.name}` exists already")
        self.by_name.update({command.name: command for command in new})

    def find(self, name: str) -> Command:
        """The command called *name*; :class:`SetupError` with the nearest one otherwise."""
        if name not in self.by_name:
            raise SetupError(f"mstar: unknown command {name!r}{nearest(name, self.by_name)}")
        return self.by_name[name]
