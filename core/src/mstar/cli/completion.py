"""``mstar completion SHELL``: a script that lets the shell complete commands, options and keys of models.

The scripts know nothing themselves: they ask ``mstar completion words`` with the words typed so far, so that new
plugins' commands and models complete at once. Answering imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from mstar.cli.commands import Command, Commands, Context, Parser, one_of

__all__ = ["register", "words_for"]

_BASH = """\
_mstar() {
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(mstar completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$2"))
}
complete -o default -F _mstar mstar
"""

_ZSH = """\
#compdef mstar
_mstar() {
    local -a found
    found=("${(@f)$(mstar completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -a found
    _files
}
compdef _mstar mstar
"""

_FISH = """\
function __mstar_words
    set -l typed (commandline -opc) (commandline -ct)
    mstar completion words -- $typed[2..-1] 2>/dev/null
end
complete -c mstar -a '(__mstar_words)'
"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def register(commands: Commands) -> None:
    """Add the command."""
    text = "Print a script for the shell's completion."
    commands.add("completion", _run, help=text, arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "shell",
        type=one_of(*_SCRIPTS, "words"),
        metavar="|".join(_SCRIPTS),
        help='which shell; bash: eval "$(mstar completion bash)"',
    )
    parser.add_argument("typed", nargs="*", help=argparse.SUPPRESS)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    if arguments.shell == "words":
        from mstar.cli.app import collect

        print("\n".join(words_for(arguments.typed, collect(context.plugins), context)))
    else:
        print(_SCRIPTS[arguments.shell], end="")
    return 0


def words_for(typed: Sequence[str], commands: Commands, context: Context) -> list[str]:
    """What may stand where the last of *typed* (which may be empty) is being written; *typed* begins after
    ``mstar``."""
    *before, last = typed or [""]
    if not before:
        return [name for name in ("--help", "--version", *commands.by_name) if name.startswith(last)]
    command = commands.by_name.get(before[0])
    if command is None:
        return []
    return [word for word in _candidates(command, context) if word.startswith(last) and word not in before]


def _candidates(command: Command, context: Context) -> Iterator[str]:
    for action in command.parser()._actions:
        if action.help == argparse.SUPPRESS:
            continue
        yield from (option for option in action.option_strings if option.startswith("--"))
        if action.option_strings:
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if action.dest == "key" or metavar.startswith("KEY"):
            yield from sorted(context.registry.models)
        elif "|" in metavar and metavar.islower():
            yield from metavar.split("|")
