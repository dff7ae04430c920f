"""Finding and loading plugins.

A plugin is a distribution with an entry point in group ``mstar.plugins``. Order of loading: the core's own
(:mod:`mstar.builtin`), then installed ones by name, then the modules that the settings add. A plugin that cannot be
imported or breaks a hook's contract is put aside with the reason; the others still serve.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pluggy

import mstar
from mstar import hookspecs
from mstar.settings import Settings
from mstar.spec.errors import PluginError, SetupError, nearest

__all__ = ["BUILTIN", "GROUP", "BrokenPlugin", "Plugin", "Plugins", "describe_broken", "load_plugins"]

GROUP = "mstar.plugins"
"""The entry-point group of plugins."""

BUILTIN = "core"
"""The name under which the core registers its own hooks."""


@dataclass(frozen=True)
class Plugin:
    """A plugin in use. *name*: of its entry point; *source*: what it was loaded from (``"package.module"``)."""

    name: str
    version: str
    source: str
    object: Any


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that is not used, and why. *error* keeps the exception for those who want the traceback."""

    name: str
    version: str
    reason: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.version}) is not used: {self.reason}"


class Plugins:
    """The plugins of this process: ``loaded``, ``broken`` and ``blocked`` (names found but not imported)."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("mstar")
        self.manager.add_hookspecs(hookspecs)
        self.loaded: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.blocked: list[str] = []

    @property
    def hook(self) -> Any:
        """pluggy's hook relay: ``plugins.hook.mstar_step_done(...)`` calls every plugin."""
        return self.manager.hook

    def add(self, name: str, version: str, source: str, load: Callable[[], Any]) -> None:
        """Import a plugin with *load* and register it, or put it aside with the reason. Never raises for its faults."""
        try:
            found = load()
        except Exception as error:
            self._set_aside(name, version, f"importing {source} failed: {_sentence(error)}", error)
            return
        if self.manager.is_registered(found):
            return  # an extra module that is installed as well
        plugin = Plugin(name, version, source, found)
        try:
            self._register(plugin)
        except (PluginError, pluggy.PluginValidationError) as error:
            if self.manager.is_registered(found):
                self.manager.unregister(found)
            self._set_aside(name, version, _sentence(error), error)
        else:
            self.loaded.append(plugin)

    def _register(self, plugin: Plugin) -> None:
        if self.manager.has_plugin(plugin.name):
            raise PluginError(f"another plugin is named {plugin.name!r} already")
        self.manager.register(plugin.object, plugin.name)
        for name in self._unknown(plugin):
            raise PluginError(f"there is no hook {name!r}{nearest(name, self.known_hooks())}")
        for name in self._unmarked(plugin):
            raise PluginError(f"{name!r} lacks its @mstar.hookimpl, so it would never be called")

    def _unknown(self, plugin: Plugin) -> Iterator[str]:
        """What pluggy's ``check_pending`` looks for, for one plugin: implementations of hooks that do not exist."""
        for caller in self.manager.get_hookcallers(plugin.object) or ():
            impls = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin.object]
            if not caller.has_spec() and not all(impl.optionalhook for impl in impls):
                yield caller.name

    def _unmarked(self, plugin: Plugin) -> Iterator[str]:
        """Functions of the plugin that are named like a hook but not marked as one."""
        for name in self.known_hooks():
            member = getattr(plugin.object, name, None)
            if isinstance(member, FunctionType) and self.manager.parse_hookimpl_opts(plugin.object, name) is None:
                yield name

    def reject(self, plugin: Plugin, error: BaseException) -> None:
        """Stop using *plugin*, which broke a contract after it was loaded."""
        self.manager.unregister(plugin.object)
        self.loaded.remove(plugin)
        self._set_aside(plugin.name, plugin.version, _sentence(error), error)

    def _set_aside(self, name: str, version: str, reason: str, error: BaseException | None) -> None:
        self.broken.append(BrokenPlugin(name, version, reason, error))

    def known_hooks(self) -> list[str]:
        """The names of all hooks."""
        return [name for name in vars(hookspecs) if name.startswith("mstar_")]

    def hooks(self, plugin: Plugin) -> list[str]:
        """The names of the hooks that *plugin* implements."""
        return sorted(caller.name for caller in self.manager.get_hookcallers(plugin.object) or ())

    def call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """Call *hook* on one plugin: its result, or nothing when it does not implement the hook (or returned ``None``).

        :raises PluginError: the plugin raised; its exception is the cause.
        """
        others = [other.object for other in self.loaded if other is not plugin]
        try:
            results: list[Any] = self.manager.subset_hook_caller(hook, others)(**arguments)
        except Exception as error:
            raise PluginError(f"{hook} failed: {_sentence(error)}") from error
        return results

    def call_each(self, hook: str, **arguments: Any) -> list[tuple[Plugin, Any]]:
        """Call *hook* plugin by plugin. One that raises is put aside and the others are still asked."""
        results = []
        for plugin in tuple(self.loaded):
            try:
                results += [(plugin, result) for result in self.call(plugin, hook, **arguments)]
            except PluginError as error:
                self.reject(plugin, error)
        return results


def load_plugins(settings: Settings) -> Plugins:
    """Load the core's hooks, the installed plugins that *settings* allow and the extra modules that they name.

    A blocked plugin, or one that the allow-list leaves out, is not imported. Both lists take the name of an entry point
    or of its distribution.

    :raises PluginError: the settings block the core itself.
    """
    plugins = Plugins()
    blocked = {_canonical(name) for name in settings.block_plugins}
    allowed = None if settings.plugins is None else {_canonical(name) for name in settings.plugins}
    if BUILTIN in blocked:
        raise PluginError(f"MSTAR_BLOCK_PLUGINS: {BUILTIN!r} is M* itself and cannot be blocked")
    plugins.add(BUILTIN, mstar.__version__, "mstar.builtin", lambda: importlib.import_module("mstar.builtin"))
    unseen = set(allowed or ()) - {BUILTIN}
    installed = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in installed:
        names = _names(entry)
        unseen -= names
        if names & blocked or not (allowed is None or names & allowed):
            plugins.blocked.append(entry.name)
        else:
            plugins.add(entry.name, _version(entry), entry.value, entry.load)
    for name in settings.extra_plugins:
        if _canonical(name) in blocked:
            plugins.blocked.append(name)
        else:
            _add_module(plugins, name)
    known = [entry.name for entry in installed]
    for name in sorted(unseen):
        missing = f"MSTAR_PLUGINS names it, but it is not installed{nearest(name, known)}"
        plugins.broken.append(BrokenPlugin(name, "no version", missing))
    return plugins


def _add_module(plugins: Plugins, name: str) -> None:
    plugins.add(name, "extra module", name, lambda: importlib.import_module(name))


def _names(entry: importlib.metadata.EntryPoint) -> set[str]:
    names = {_canonical(entry.name)}
    return names | {_canonical(entry.dist.name)} if entry.dist else names


def _version(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.version if entry.dist else "unknown version"


def _canonical(name: str) -> str:
    """The form in which the packaging standards compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _sentence(error: BaseException) -> str:
    if isinstance(error, SetupError):
        return str(error)
    if isinstance(error, pluggy.PluginValidationError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def describe_broken(broken: Sequence[BrokenPlugin]) -> str:
    """One line for each broken plugin, each after a line break; empty when all work."""
    return "".join(f"\n  {plugin}" for plugin in broken)
