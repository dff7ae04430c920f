"""Writes a new family's package from the templates beside this module."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import mstar
from mstar.scaffold.names import Names
from mstar.scaffold.patterns import PATTERNS
from mstar.spec.errors import SetupError, nearest

__all__ = ["write_package"]

_SUFFIX = ".txt"  # a template is no Python file, for tools that look for some


def write_package(folder: Path, names: Names, pattern: str) -> list[Path]:
    """Write a package of *pattern* into *folder*, which must not exist yet or be empty. Returns the files written.

    :raises SetupError: the pattern is unknown, the folder has something in it, or it cannot be written.
    """
    if pattern not in PATTERNS:
        raise SetupError(f"there is no pattern {pattern!r}{nearest(pattern, PATTERNS)}")
    try:
        return _write(folder, names, pattern)
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error.strerror or error}; choose another --dir") from None


def _write(folder: Path, names: Names, pattern: str) -> list[Path]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SetupError(f"{folder} exists already; nothing is overwritten: choose another name or --dir")
    values = _values(names, pattern)
    root = files("mstar.scaffold") / "templates"
    written = []
    for source in ("common", pattern):
        for path, template in _templates(root / source):
            file = folder / path.replace("PACKAGE", names.package).replace("KEY", names.key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
            written.append(file)
    return sorted(written)


def _templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Every template below *folder*, with the path of the file that it makes."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield prefix + entry.name.removesuffix(_SUFFIX), entry


def _values(names: Names, pattern: str) -> dict[str, str]:
    facts = PATTERNS[pattern]
    major, minor = mstar.__version__.split(".")[:2]
    limit = f"0.{int(minor) + 1}" if major == "0" else str(int(major) + 1)
    return {
        "dist": names.distribution,
        "package": names.package,
        "plugin": names.plugin,
        "key": names.key,
        "name": names.title,
        "summary": facts.summary,
        "about": facts.about,
        "ask": facts.ask(names.key),
        "todo": "\n".join(f"{number}. {step}" for number, step in enumerate(facts.todo, 1)),
        "core_version": f"{major}.{minor}",
        "core_limit": limit,
    }
