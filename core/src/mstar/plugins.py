"""Finding and loading plugins.

A plugin is a distribution with an entry point in group ``mstar.plugins``. Order of loading: the core's own
(:mod:`mstar.builtin`), then installed ones by name, then the modules that the settings add. A plugin that cannot be
imported or breaks a hook's contract is put aside with the reason; the others still serve.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pluggy

import mstar
from mstar import hookspecs
from mstar.hook_trace import trace_hooks
from mstar.plugin_code import Interrupted, guest
from mstar.requirements import CORE, GROUP, canonical, check_core
from mstar.settings import Settings
from mstar.spec.errors import PluginError, SetupError, nearest
from mstar.spec.origin import describe

__all__ = [
    "BUILTIN",
    "GROUP",
    "BrokenPlugin",
    "Plugin",
    "Plugins",
    "describe_broken",
    "installed_entries",
    "load_plugins",
]

BUILTIN = "core"
"""The name under which the core registers its own hooks."""

_EXTRA = "extra module"
"""What a module has in place of a version."""

_HOOKLESS = "mark its functions with @mstar.hookimpl, name another module, or take it out of MSTAR_EXTRA_PLUGINS"
_UNMARKED = "mark its functions with @mstar.hookimpl, or name another module in the entry point"
_OBJECT = "name the module with the hooks in the entry point"


@dataclass(frozen=True)
class Plugin:
    """A plugin in use.

    :param name: of its entry point. :param source: what it was loaded from (``"package.module"``).
    :param distribution: what pip installed it as; ``None`` for the core and for extra modules.
    """

    name: str
    version: str
    source: str
    object: Any
    distribution: str | None = None


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that is not used.

    :param reason: why. :param remedy: what to do. :param error: the exception, for those who want the traceback.
    """

    name: str
    version: str
    reason: str
    error: BaseException | None = None
    remedy: str = ""
    distribution: str | None = None

    def __str__(self) -> str:
        said = f"plugin {self.name!r} ({self.version}) is not used: {self.reason}"
        end = "" if said.endswith((".", "?", "!")) else "."
        return f"{said}{end} To mend it: {self.remedy}" if self.remedy else said


class Plugins:
    """The plugins of this process: ``loaded``, ``broken`` and ``blocked`` (names found but not imported).

    :ivar when_rejected: called with each plugin that is rejected after it was loaded, to forget what it offered.
    :ivar unknown: (variable, name) of names in the settings that belong to no installed plugin, each with a sentence.
    :param memory: a file that keeps what each plugin offered, so that one that fails later can still be found by its
        models' keys; ``None`` keeps nothing.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self.memory = memory
        self.manager = pluggy.PluginManager("mstar")
        self.manager.add_hookspecs(hookspecs)
        self.loaded: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.blocked: list[str] = []
        self.unknown: dict[tuple[str, str], str] = {}
        self.when_rejected: list[Callable[[Plugin], None]] = []

    @property
    def hook(self) -> Any:
        """pluggy's hook relay: ``plugins.hook.mstar_step_done(...)`` calls every plugin."""
        return self.manager.hook

    def add(
        self, name: str, version: str, source: str, load: Callable[[], Any], distribution: str | None = None
    ) -> None:
        """Import a plugin with *load* and register it, or put it aside with the reason. Never raises for its faults."""
        about = BrokenPlugin(name, version, "", distribution=distribution)
        try:
            with guest():
                found = load()
        except PluginError as error:
            self._set_aside(about, _sentence(error), error)
            return
        except Interrupted:
            raise Interrupted(f"while plugin {name!r} was imported") from None
        except BaseException as error:  # a module that exits when it is imported, say, must not end us
            self._set_aside(about, f"importing {source} failed: {_sentence(error, source)}", error)
            return
        same = next((plugin for plugin in self.loaded if plugin.object is found), None)
        if same is not None:
            if version != _EXTRA:  # an extra module may be installed as well
                reason = f"plugin {same.name!r} is the same module, {source}"
                remedy = "take one of the two entry points out of its package"
                self.broken.append(replace(about, reason=reason, remedy=remedy))
            return
        plugin = Plugin(name, version, source, found, distribution)
        try:
            with guest():
                self._register(plugin)
        except Interrupted:
            raise
        except BaseException as error:
            if self.manager.get_plugin(name) is found is not None:
                self.manager.unregister(found)
            self._set_aside(about, _sentence(error), error)
        else:
            self.loaded.append(plugin)

    def _register(self, plugin: Plugin) -> None:
        _check_object(plugin)
        _check_hook_api(plugin)
        if self.manager.has_plugin(plugin.name):
            raise PluginError(f"another plugin is named {plugin.name!r} already", remedy="uninstall one of the two")
        self.manager.register(plugin.object, plugin.name)
        for name in self._unknown(plugin):
            raise PluginError(f"there is no hook {name!r}{nearest(name, self.known_hooks())}")
        for name in self._unmarked(plugin):
            raise PluginError(f"{name!r} lacks its @mstar.hookimpl, so it would never be called")
        if not self.hooks(plugin):
            raise _hookless(plugin)

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
        for forget in self.when_rejected:
            forget(plugin)
        about = BrokenPlugin(plugin.name, plugin.version, "", distribution=plugin.distribution)
        self._set_aside(about, _sentence(error), error)

    def _set_aside(self, about: BrokenPlugin, reason: str, error: BaseException) -> None:
        remedy = getattr(error, "remedy", "") or _remedy(about, error)
        self.broken.append(replace(about, reason=reason, error=error, remedy=remedy))

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
            with guest():
                results: list[Any] = self.manager.subset_hook_caller(hook, others)(**arguments)
        except Interrupted:
            raise Interrupted(f"in {hook} of plugin {plugin.name!r}") from None
        except BaseException as error:
            raise PluginError(f"{hook} failed: {_sentence(error, plugin.source)}") from error
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


def load_plugins(settings: Settings, *, remember: bool = False) -> Plugins:
    """Load the core's hooks, the installed plugins that *settings* allow and the extra modules that they name.

    A blocked plugin, or one that the allow-list leaves out, is not imported. Both lists take the name of an entry point
    or of its distribution. A distribution that requires another version of the core is not imported either.

    :param remember: keep in the cache folder which models each plugin offers, for the day on which it fails.
    :raises PluginError: the settings block the core itself.
    """
    plugins = Plugins(settings.cache / "plugins.json" if remember else None)
    if settings.trace_plugins:
        trace_hooks(plugins.manager, sys.stderr)
    blocked = {canonical(name) for name in settings.block_plugins}
    allowed = None if settings.plugins is None else {canonical(name) for name in settings.plugins}
    if BUILTIN in blocked:
        raise PluginError(f"MSTAR_BLOCK_PLUGINS: {BUILTIN!r} is M* itself and cannot be blocked")
    plugins.add(BUILTIN, mstar.__version__, "mstar.builtin", lambda: importlib.import_module("mstar.builtin"))
    seen = {BUILTIN}
    installed, damaged = installed_entries()
    plugins.broken += damaged
    seen |= {broken.name for broken in damaged}
    for entry in installed:
        distribution, version = _installed_as(entry)
        names = {canonical(name) for name in (entry.name, distribution) if name}
        seen |= names
        if names & blocked or not (allowed is None or names & allowed):
            plugins.blocked.append(entry.name)
        else:
            plugins.add(entry.name, version, entry.value, partial(_import, entry), distribution)
    for name in settings.extra_plugins:
        if canonical(name) in blocked:
            plugins.blocked.append(name)
        else:
            _add_module(plugins, name)
    known = {entry.name for entry in installed}
    for name in sorted((allowed or set()) - seen):
        missing = f"MSTAR_PLUGINS names it, but it is not installed{nearest(name, known)}"
        remedy = "install it, or take it off the list"
        about = BrokenPlugin(name, "no version", missing, remedy=remedy)
        plugins.broken.append(about)
        plugins.unknown["MSTAR_PLUGINS", name] = str(about)
    modules = {canonical(name): name for name in settings.extra_plugins}
    for name in sorted(blocked - seen - modules.keys()):
        hint = nearest(name, {*known, *modules.values()})
        plugins.unknown["MSTAR_BLOCK_PLUGINS", name] = f"MSTAR_BLOCK_PLUGINS: no plugin {name!r} is installed{hint}"
    return plugins


def installed_entries() -> tuple[list[importlib.metadata.EntryPoint], list[BrokenPlugin]]:
    """The entry points of all distributions, by name, and the distributions whose entry points cannot be read.

    One at a time, where :func:`importlib.metadata.entry_points` fails for all because of one. Of two distributions with
    one name the first on the path counts, as there.
    """
    found, damaged = [], []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        folder = str(getattr(distribution, "_path", "its folder"))
        name = Path(folder).name.partition("-")[0]  # as its folder has it: what is inside may be damaged
        try:
            name = getattr(distribution, "_normalized_name", None) or distribution.name
            if name in seen:
                continue
            seen.add(name)
            found += [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:  # it depends on the Python version and on the damage what importlib raises
            reason = f"its entry points, in {folder}, cannot be read: {_sentence(error)}"
            name = canonical(name)
            remedy = f"run `pip install --force-reinstall {name}`, or uninstall it"
            damaged.append(BrokenPlugin(name, "unknown version", reason, error, remedy, distribution=name))
    return sorted(found, key=lambda entry: entry.name), damaged


def _add_module(plugins: Plugins, name: str) -> None:
    plugins.add(name, _EXTRA, name, lambda: importlib.import_module(name))


def _check_object(plugin: Plugin) -> None:
    """pluggy takes ``None`` for a name that is blocked, and the functions of a class for hooks that lack nothing."""
    if plugin.object is None or isinstance(plugin.object, type):
        what = "None" if plugin.object is None else "a class"
        raise PluginError(f"{plugin.source!r} is {what}, which has no hooks", remedy=_OBJECT)


def _hookless(plugin: Plugin) -> PluginError:
    if not isinstance(plugin.object, ModuleType):
        return PluginError(
            f"{plugin.source!r} is of type {type(plugin.object).__name__} and has no hooks", remedy=_OBJECT
        )
    there = f"{plugin.source}.plugin"  # where packages have them
    is_package = hasattr(plugin.object, "__path__")
    hint = f"; did you mean {there!r}?" if is_package and importlib.util.find_spec(there) else ""
    missing = f"module {plugin.source!r} has no mstar_… hook{hint}"
    return PluginError(missing, remedy=_HOOKLESS if plugin.version == _EXTRA else _UNMARKED)


def _import(entry: importlib.metadata.EntryPoint) -> Any:
    if entry.dist is not None:
        distribution, _ = _installed_as(entry)
        if distribution is None:
            folder = getattr(entry.dist, "_path", "its folder")
            raise PluginError(
                f"what pip wrote about it in {folder} is damaged, as after an installation that was interrupted",
                remedy="delete that folder, and install the plugin again",
            )
        check_core(distribution, entry.dist.requires or (), mstar.__version__)
    return entry.load()


def _check_hook_api(plugin: Plugin) -> None:
    wanted = getattr(plugin.object, "MSTAR_HOOK_API", hookspecs.HOOK_API)
    if not isinstance(wanted, int) or wanted > hookspecs.HOOK_API:
        raise PluginError(
            f"it is written for version {wanted!r} of the hooks; {CORE} {mstar.__version__} has {hookspecs.HOOK_API}",
            remedy=f"run `pip install --upgrade {CORE}`",
        )


def _installed_as(entry: importlib.metadata.EntryPoint) -> tuple[str | None, str]:
    """Name and version of *entry*'s distribution; no name when its metadata cannot be read."""
    unknown = (None, "unknown version")
    if entry.dist is None:
        return unknown
    try:
        name, version = entry.dist.name, entry.dist.version
    except Exception:  # it depends on the Python version what importlib raises for a missing or damaged file
        return unknown
    return (name, version) if name and version else unknown


def _sentence(error: BaseException, source: str = "") -> str:
    """*error* in words. *source*: the plugin's module, to name the line of its code."""
    if isinstance(error, SetupError):
        return str(error)
    if isinstance(error, pluggy.PluginValidationError):
        return " ".join(str(error).split())
    return describe(error, (source,) if source else ())


def _remedy(about: BrokenPlugin, error: BaseException) -> str:
    """What to do about a plugin that failed with *error*."""
    if isinstance(error, PluginError) and error.__cause__ is not None:
        error = error.__cause__  # what its hook raised
    missing = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    update = f"`pip install --upgrade {about.distribution}`" if about.distribution else ""
    if missing == "mstar" and update:
        return f"it was made for another version of {CORE}; run `pip install --upgrade {CORE} {about.distribution}`"
    if missing and canonical(missing) == canonical(about.distribution or ""):
        return f"run `pip install --force-reinstall {about.distribution}`"
    if isinstance(error, ModuleNotFoundError) and update:
        return f"run `pip install {about.distribution}`, which also installs what it lacks"
    if isinstance(error, ModuleNotFoundError):
        return "check the spelling in MSTAR_EXTRA_PLUGINS, and install what the module needs"
    if not update:
        return "mend the module (`mstar plugins --traceback` shows where it failed)"
    return (
        f"{update}, or report it to its authors (`mstar plugins --traceback` shows where it failed); "
        f"MSTAR_BLOCK_PLUGINS={about.name} leaves it out"
    )


def describe_broken(broken: Sequence[BrokenPlugin]) -> str:
    """One line for each broken plugin, each after a line break; empty when all work."""
    return "".join(f"\n  {plugin}" for plugin in broken)
