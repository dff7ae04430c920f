"""Checks of a plugin as such: that it loads, lightly, and is documented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mstar.plugins import Plugin, installed_entries
from mstar.registry import Registry
from mstar.spec.errors import PluginError
from mstar.testing.conformance.subject import fail, find_plugin, models_of

__all__ = ["PluginChecks"]

HEAVY = ("torch", "transformers", "tensorflow", "jax", "fastapi", "mstar_server")
"""Packages that a plugin's light module must leave alone: each costs every `mstar` command a second or more."""

LISTING = (
    "mstar_models",
    "mstar_resources",
    "mstar_attention_backends",
    "mstar_engines",
    "mstar_schedulers",
    "mstar_executors",
    "mstar_weight_sources",
)
"""Hooks that are called to list what there is."""

_LAZY_PROGRAM = """
import importlib.abc, importlib.metadata, json, sys, traceback
heavy, listing, path, source = json.load(sys.stdin)
sys.path[:] = path
culprits = {}

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in culprits:
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if f.filename[0] != "<"]
            culprits[name] = " -> ".join([f for f in frames if "importlib" not in f][-4:])

from mstar.plugins import Plugins
plugins, stages = Plugins(), {}
sys.meta_path.insert(0, Watch())
plugins.add("it", "0", source, importlib.metadata.EntryPoint("it", source, "mstar.plugins").load)
stages["import"] = dict(culprits)
for plugin in plugins.loaded:
    for hook in set(plugins.hooks(plugin)) & set(listing):
        known = set(culprits)
        plugins.call(plugin, hook)
        stages[hook] = {package: where for package, where in culprits.items() if package not in known}
print(json.dumps(stages))
"""


class PluginChecks:
    """The plugin loads, offers something, imports nothing heavy and documents its models."""

    def test_plugin_is_used(self, mstar_plugin: str, mstar_registry: Registry) -> None:
        """It could be imported, its hooks exist and return what they promise."""
        try:
            plugin = find_plugin(mstar_registry, mstar_plugin)
        except PluginError as error:
            fail(str(error))
        if not mstar_registry.plugins.hooks(plugin):
            fail(f"plugin {plugin.name!r} implements no hook: mark its functions with @mstar.hookimpl")

    def test_imports_nothing_heavy(self, mstar_plugin: str, mstar_registry: Registry) -> None:
        """Importing the plugin's module and calling its listing hooks leaves torch and its like alone (promise P1)."""
        source = _source(mstar_registry, mstar_plugin)
        for stage, culprits in _heavy_imports(source).items():
            for package, where in culprits.items():
                moment = f"importing {source!r}" if stage == "import" else f"calling its {stage}"
                fail(
                    f"plugin {mstar_plugin!r}: {moment} imports {package} at {where}. `mstar --help` and `mstar "
                    "models` import every plugin: name classes as 'module:Class' strings, and import what is heavy in "
                    "the modules behind them."
                )

    def test_every_model_is_documented(self, mstar_plugin: str, mstar_registry: Registry) -> None:
        """The plugin's README names every key that it adds."""
        try:
            plugin = find_plugin(mstar_registry, mstar_plugin)
        except PluginError:
            pytest.skip(f"plugin {mstar_plugin!r} is not used: see test_plugin_is_used")
        keys = models_of(mstar_registry, plugin)
        text, where = _readme(plugin)
        missing = [key for key in keys if not re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text)]
        if missing:
            fail(
                f"plugin {plugin.name!r}: {where} does not name {', '.join(missing)}: say what each key serves, under "
                "which terms, and what it needs"
            )


def _source(registry: Registry, name: str) -> str:
    """The module that the plugin is loaded from, whether it could be used or not."""
    for entry in installed_entries()[0]:
        if name in (entry.name, entry.dist.name if entry.dist else ""):
            return entry.value
    return name


def _heavy_imports(source: str) -> dict[str, dict[str, str]]:
    """Stage → heavy package → the line that imported it, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", _LAZY_PROGRAM],
        input=json.dumps([HEAVY, LISTING, sys.path, source]),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    if done.returncode != 0:
        fail(f"{source!r} could not be imported in a fresh interpreter:\n{done.stderr}")
    stages: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return stages


def _readme(plugin: Plugin) -> tuple[str, str]:
    """The plugin's README, and where it was found: beside its sources, else in its distribution's metadata."""
    file = getattr(plugin.object, "__file__", None)
    if file is not None:
        for folder in Path(file).absolute().parents:
            if (folder / "README.md").is_file():
                return (folder / "README.md").read_text(encoding="utf-8"), str(folder / "README.md")
            if folder.name == "site-packages" or (folder / "pyproject.toml").is_file():
                break
    for entry in installed_entries()[0]:
        if entry.name == plugin.name and entry.dist is not None:
            description = entry.dist.metadata.get("Description") or entry.dist.metadata.get_payload()  # type: ignore[attr-defined]
            return str(description or ""), f"the README in the metadata of {entry.dist.name}"
    return "", "no README.md was found beside the plugin's module, and it"
