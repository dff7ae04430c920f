"""The names of a new family, and whether they may be used."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass

from mstar.plugins import Plugins
from mstar.registry import Registry
from mstar.spec.errors import SetupError

__all__ = ["Names", "choose_names"]

_DISTRIBUTION = re.compile(r"[a-z0-9]|[a-z0-9][a-z0-9._-]*[a-z0-9]", re.IGNORECASE)  # PEP 508
_KEY = re.compile(r"[a-z0-9]|[a-z0-9][a-z0-9.-]*[a-z0-9]")


_FOLDERS = frozenset(("test", "tests", "src", "docs", "deployments", "conftest"))
_LONGEST = 80


@dataclass(frozen=True)
class Names:
    """*distribution*: on the package index; *package*: to import; *plugin*: its entry point; *key*: of its model;
    *title*: how its classes begin."""

    distribution: str
    package: str
    plugin: str
    key: str
    title: str


def choose_names(name: str, key: str | None, registry: Registry) -> Names:
    """All names of the family *name*.

    :raises SetupError: one is no valid name, or something installed has it.
    """
    if not _DISTRIBUTION.fullmatch(name):
        raise SetupError(f"{name!r} is no name for a package: letters, digits and - . _ between them (mstar-mymodel)")
    package = re.sub(r"[-_.]+", "_", name).lower()
    if not package.isidentifier() or keyword.iskeyword(package):
        raise SetupError(f"{name!r} would be imported as {package!r}, which Python cannot; begin with a letter")
    if package in _FOLDERS or len(package) > _LONGEST:
        why = "a folder of the package has that name" if package in _FOLDERS else f"more than {_LONGEST} letters"
        raise SetupError(f"{name[:60]!r} cannot be the name: {why}; try mstar-{package[:20]}")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise SetupError(f"{name!r} would be imported as {package!r}, and there is a package of that name already")
    short = package.removeprefix("mstar_").replace("_", "-") or package
    key = short if key is None else key
    if not _KEY.fullmatch(key):
        raise SetupError(f"--key {key!r}: a key is small letters and digits, with - and . between them")
    _check_free(short, key, registry.plugins, registry)
    title = "".join(word[:1].upper() + word[1:] for word in short.split("-"))
    if not title.isidentifier():  # classes cannot begin with a digit
        title = "Model" + title
    return Names(name, package, short, key, title)


def _check_free(plugin: str, key: str, plugins: Plugins, registry: Registry) -> None:
    taken = [*(p.name for p in plugins.loaded), *(p.name for p in plugins.broken), *plugins.blocked]
    if plugin in taken:
        raise SetupError(f"a plugin {plugin!r} is installed already (`mstar plugins` lists them); choose another name")
    if key in registry.models:
        owner = registry.models[key].plugin.name
        raise SetupError(f"the key {key!r} is taken by plugin {owner!r}; choose another with --key")
