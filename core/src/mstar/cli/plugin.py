"""``mstar plugin new NAME`` writes a new family's package; ``mstar plugin test NAME|DIR`` tests one."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.scaffold.names import choose_names
from mstar.scaffold.patterns import PATTERNS
from mstar.spec.errors import SetupError, nearest

__all__ = ["register"]

_ACTIONS = ("new", "test")
_DEFAULT = "causal-lm"


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("plugin", _run, help="Write a new model family, or test one.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument(
        "action", type=one_of(*_ACTIONS), metavar="new|test", help="write a new package, or run a package's tests"
    )
    parser.add_argument(
        "name", metavar="NAME", help="new: of the package (mstar-mymodel); test: an installed plugin, or a folder"
    )
    names = "|".join(PATTERNS)
    parser.add_argument(
        "--pattern", type=one_of(*PATTERNS), metavar=names, help="new: how the model works; asked if left out"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="new: where the package's folder goes (default: here)")
    parser.add_argument("--key", metavar="KEY", help="new: the model's key (default: NAME without mstar-)")
    parser.add_argument("--yes", action="store_true", help=f"new: ask nothing; the pattern is {_DEFAULT} unless given")


def _run(arguments: argparse.Namespace, context: Context) -> int:
    if arguments.action == "new":
        return _new(arguments, context)
    for option in ("pattern", "dir", "key"):
        if getattr(arguments, option) is not None:
            raise SetupError(f"--{option} is for `mstar plugin new`")
    return _test(arguments.name, context)


# --- new -------------------------------------------------------------------------------------------------------------


def _new(arguments: argparse.Namespace, context: Context) -> int:
    from mstar.scaffold.write import write_package

    names = choose_names(arguments.name, arguments.key, context.registry)
    pattern = arguments.pattern or (_DEFAULT if arguments.yes else _ask())
    folder = (arguments.dir or Path()) / names.distribution
    written = write_package(folder, names, pattern)
    print(f"{folder}: {len(written)} files, pattern {pattern}, model key {names.key}. Next:\n")
    print(f"  cd {folder}\n  pip install -e '.[test]'\n  mstar plugin test .")
    print(f"  python -m {names.package}.tiny tiny-weights\n  mstar serve {names.key} --weights tiny-weights")
    print("\nREADME.md says what to change first.")
    return 0


def _ask() -> str:
    """The pattern, asked for on the terminal."""
    if not sys.stdin.isatty():
        raise SetupError(f"which pattern? Name it with --pattern: {', '.join(PATTERNS)}")
    print("How does the model work?\n")
    for number, (name, pattern) in enumerate(PATTERNS.items(), 1):
        print(f"  {number}  {name:16} {pattern.help}")
    choices = [*PATTERNS]
    while True:
        try:
            answer = input(f"\nNumber or name [{_DEFAULT}]: ").strip() or _DEFAULT
        except EOFError:
            raise SetupError("no pattern was chosen; name it with --pattern") from None
        if answer.isdecimal() and 1 <= int(answer) <= len(choices):
            return choices[int(answer) - 1]
        if answer in PATTERNS:
            return answer
        print(f"There is no pattern {answer!r}{nearest(answer, choices)}")


# --- test ------------------------------------------------------------------------------------------------------------


def _test(name: str, context: Context) -> int:
    """Run pytest in a process of its own; its exit status is ours (1 for whatever is not success)."""
    if importlib.util.find_spec("pytest") is None:
        raise SetupError("the tests need pytest; run `pip install pytest httpx`")
    folder = Path(name)
    if (folder / "pyproject.toml").is_file():
        status = _test_folder(folder.absolute())
    else:
        status = _test_installed(name, context)
    return 1 if status else 0


def _test_folder(folder: Path) -> int:
    """A package's own tests, whether it is installed or not; the conformance suite too if they do not hold it."""
    modules = _plugin_modules(folder)
    extra = [word for word in os.environ.get("MSTAR_EXTRA_PLUGINS", "").split(",") if word]
    environment = {
        **os.environ,
        "MSTAR_EXTRA_PLUGINS": ",".join(dict.fromkeys([*extra, *modules])),
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    tests = folder / "tests"
    status = _pytest([], folder, environment) if tests.is_dir() else 0
    if any("PluginConformance" in file.read_text(encoding="utf-8") for file in tests.rglob("*.py")):
        return status
    return max(status, *(_pytest(["--mstar-plugin", module], folder, environment) for module in modules))


def _test_installed(name: str, context: Context) -> int:
    """The conformance suite on an installed plugin."""
    plugins = context.registry.plugins
    loaded = [word for plugin in plugins.loaded for word in (plugin.name, plugin.distribution) if word]
    if name not in loaded:
        broken = next((f"; {plugin}" for plugin in plugins.broken if plugin.name == name), None)
        raise SetupError(f"there is no folder and no plugin {name!r}{broken or nearest(name, loaded)}")
    return _pytest(["--mstar-plugin", name], Path.cwd(), dict(os.environ))


def _pytest(words: list[str], folder: Path, environment: dict[str, str]) -> int:
    sys.stdout.flush()
    return subprocess.call([sys.executable, "-m", "pytest", *words], cwd=folder, env=environment)


def _plugin_modules(folder: Path) -> list[str]:
    """The modules that a package's ``mstar.plugins`` entry points name."""
    file = folder / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from None
    modules = list(project.get("entry-points", {}).get("mstar.plugins", {}).values())
    if not modules:
        raise SetupError(f"{file} has no entry point in group mstar.plugins: it is no plugin of M*")
    return modules
