"""``mstar completion SHELL``: a script that lets the shell complete commands, options, their values and keys of models.

The scripts know nothing themselves: they ask ``mstar completion words`` with the words typed so far, so that new
plugins' commands and models complete at once; where it has no answer, the shell offers files. Values are those that an
argument's metavar lists (``cpu|cuda``), and what plugins provide. Answering imports no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mstar.cli.commands import Command, Commands, Context, Parser, one_of

__all__ = ["register", "words_for"]

_BASH = """\
_mstar() {
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(mstar completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "${2#=}"))
    [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace 2>/dev/null
}
complete -o default -F _mstar mstar
"""

_ZSH = """\
#compdef mstar
_mstar() {
    local -a found
    found=("${(@f)$(mstar completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then
        compadd -S '' -- ${(M)found:#*=}
        compadd -- ${found:#*=}
    else
        _files
    fi
}
compdef _mstar mstar
"""

_FISH = """\
function __mstar_words
    set -l typed (commandline -opc) (commandline -ct)
    set -l found (mstar completion words -- $typed[2..-1] 2>/dev/null)
    if test -n "$found"
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c mstar -f -a '(__mstar_words)'
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
    """What may stand where the last of *typed* (which may be empty) is being written; *typed* begins after ``mstar``.
    Nothing means: let the shell offer files."""
    *before, last = typed or [""]
    if not before:
        return [name for name in ("--help", "--version", *commands.by_name) if name.startswith(last)]
    command = commands.by_name.get(before[0])
    if command is None:
        return []
    line = _Line.read(command, before[1:], last)
    return [line.prefix + word for word in line.candidates(context) if word.startswith(line.last)]


@dataclass
class _Line:
    """A command line up to the word that is being written.

    :param last: that word, without the *prefix* ``--option=``. :param option: the option whose value it is.
    :param positionals: those that may still come. :param given: values of positional arguments, by name.
    :param used: options that stand there already.
    """

    actions: Sequence[argparse.Action]
    last: str
    prefix: str = ""
    option: argparse.Action | None = None
    positionals: list[argparse.Action] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, command: Command, before: Sequence[str], last: str) -> _Line:
        actions = [action for action in command.parser()._actions if action.help != argparse.SUPPRESS]
        line = cls(actions, last, positionals=[action for action in actions if not action.option_strings])
        words = list(_apart(before))
        for word in words:
            line._take(word)
        if last.startswith("--") and "=" in last:
            name, _, line.last = last.partition("=")
            line.prefix = f"{name}="
            line._take(name)
        elif last == "=" and line.option is not None:  # bash takes the sign for a word
            line.last = ""
        return line

    def _take(self, word: str) -> None:
        if self.option is not None:
            self.option = None
        elif word.startswith("-") and word != "-":
            self.used.add(word)
            option = next((action for action in self.actions if word in action.option_strings), None)
            self.option = option if option is not None and option.nargs != 0 else None
        elif self.positionals:
            self.given[self.positionals[0].dest] = word
            if self.positionals[0].nargs not in ("*", "+"):
                self.positionals.pop(0)

    def candidates(self, context: Context) -> Iterator[str]:
        if self.option is not None:
            yield from self._values(self.option, context)
            return
        for action in self.actions:
            if isinstance(action, argparse._AppendAction) or not self.used.intersection(action.option_strings):
                yield from (name for name in action.option_strings if name.startswith("--"))
        if self.positionals:
            yield from self._values(self.positionals[0], context)

    def _values(self, action: argparse.Action, context: Context) -> Iterator[str]:
        """The words that *action* takes, as far as they can be listed."""
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        models = context.registry.models
        model = models.get(self.given.get("key", ""))
        if action.dest == "on_demand" or (
            not action.option_strings and (action.dest == "key" or metavar.startswith("KEY"))
        ):
            yield from sorted(models)
        elif "|" in metavar:
            yield from (word for word in metavar.split("|") if word == word.lower())
        elif action.dest == "executor":
            yield from context.registry.names("mstar_executors")
        elif action.dest == "set" and model is not None:
            yield from (f"{name}=" for name in model.spec.knobs.model_fields)
        elif action.dest == "want" and model is not None:
            yield from model.spec.outputs


def _apart(words: Sequence[str]) -> Iterator[str]:
    """*words*, with ``--option=value`` as two words and without the ``=`` that bash takes for a word of its own."""
    words = [*words]
    while words:
        word = words.pop(0)
        name, sign, value = word.partition("=")
        if sign and name.startswith("--"):
            yield name
            words.insert(0, value)
        elif word == "=":
            continue
        elif words[:1] == ["="]:  # KNOB = VALUE, or --option = VALUE
            yield word
            if not word.startswith("-"):
                del words[:2]
        else:
            yield word
