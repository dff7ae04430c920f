"""Installed plugins for tests: modules and distributions' metadata in a folder of their own."""

from __future__ import annotations

from pathlib import Path

from mstar.plugins import BrokenPlugin, Plugins, load_plugins
from mstar.settings import Settings

__all__ = ["GOOD", "HEAD", "Site", "broken_by", "load", "names", "the_broken"]

HEAD = "import mstar\n"
GOOD = HEAD + '@mstar.hookimpl\ndef mstar_engines():\n    return {"good": "good_module:Runner"}\n'


class Site:
    """A folder on ``sys.path`` in which a test writes modules and installed distributions."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.modules: list[str] = []

    def module(self, name: str, code: str) -> str:
        (self.folder / f"{name}.py").write_text(code)
        self.modules.append(name)
        return name

    def distribution(self, name: str, version: str, entry: str, module: str, *requires: str) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[mstar.plugins]\n{entry} = {module}\n")


def load(*extra: str, plugins: tuple[str, ...] = (), block_plugins: tuple[str, ...] = ()) -> Plugins:
    """The core, the extra modules, and of the installed plugins only those that a test allows."""
    return load_plugins(Settings(extra_plugins=extra, plugins=plugins, block_plugins=block_plugins))


def names(plugins: Plugins) -> list[str]:
    return [plugin.name for plugin in plugins.loaded]


def the_broken(plugins: Plugins) -> BrokenPlugin:
    (broken,) = plugins.broken
    return broken


def broken_by(site: Site, *requires: str, code: str = GOOD) -> list[BrokenPlugin]:
    """What is broken when a plugin with these requirements is installed."""
    site.module("bound_mod", code)
    site.distribution("mstar-bound", "1.4", "bound", "bound_mod", *requires)
    return load(plugins=("bound",)).broken
