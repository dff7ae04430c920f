"""What the plugins provide, by name. Everything is looked up here and imported only when asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mstar.plugin_code import Interrupted, guest
from mstar.plugin_memory import Remembered, recall, remember
from mstar.plugins import BUILTIN, Plugin, Plugins, describe_broken
from mstar.requirements import canonical
from mstar.spec.errors import PluginError, SetupError, nearest
from mstar.spec.model import ModelSpec
from mstar.spec.model_check import shown, spec_faults
from mstar.spec.origin import describe

if TYPE_CHECKING:
    from mstar.cluster.base import Executor
    from mstar.resources.base import Resource
    from mstar.scheduler.base import Scheduler

__all__ = ["RegisteredModel", "Registry", "load_object"]

log = logging.getLogger(__name__)

_KINDS = {
    "mstar_resources": "resource kind",
    "mstar_attention_backends": "attention backend",
    "mstar_engines": "engine",
    "mstar_schedulers": "scheduler",
    "mstar_executors": "executor",
    "mstar_weight_sources": "weight source",
}


def load_object(target: str) -> Any:
    """Import ``"module:Name"`` (or ``"module:Outer.inner"``) and return the object.

    :raises SetupError: *target* is not of that form, or its module has no such name.
    :raises ImportError: (or whatever the module raises) the module cannot be imported.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise SetupError(f"{target!r} does not name an object: write it as 'module:Name'")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise SetupError(f"{target!r}: no {part!r} there{nearest(part, _public_names(found))}") from None
    return found


def _public_names(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")]


class RegisteredModel(NamedTuple):
    """A model and the plugin that it came from."""

    spec: ModelSpec
    plugin: Plugin


class _Offer(NamedTuple):
    target: str
    plugin: Plugin


class _Table:
    """The objects of one kind, by name; each is imported when it is asked for."""

    def __init__(self, kind: str, plugins: Plugins):
        self.kind = kind
        self.offers: dict[str, _Offer] = {}
        self._plugins = plugins

    def load(self, name: str) -> Any:
        """The object registered under *name*.

        :raises SetupError: there is none; names the kind and lists what exists.
        :raises PluginError: it is there but cannot be imported.
        """
        self.require(name)
        target, plugin = self.offers[name]
        try:
            with guest():
                return load_object(target)
        except Interrupted:
            raise
        except BaseException as error:
            cause = str(error) if isinstance(error, SetupError) else describe(error)
            owner = f"plugin {plugin.name!r} ({plugin.version})"
            raise PluginError(f"{self.kind} {name!r} of {owner} cannot be imported from {target!r}: {cause}") from error

    def require(self, name: str) -> None:
        """:raises SetupError: nothing is registered under *name*; as :meth:`load` says it."""
        if name not in self.offers:
            known = f"there are: {', '.join(sorted(self.offers)) or 'none'}"
            hint = nearest(name, self.offers) if self.offers else ""
            listed = f"{hint} ({known})" if "did you mean" in hint else f"; {known}"
            raise SetupError(f"there is no {self.kind} {name!r}{listed}{describe_broken(self._plugins.broken)}")


class Registry:
    """All that the plugins provide. Building it imports no torch.

    A plugin whose hooks return something else than they promise, or a name that another plugin has already, is put
    aside whole (see :attr:`Plugins.broken <mstar.plugins.Plugins>`): half a plugin would be a puzzle.
    """

    def __init__(self, plugins: Plugins):
        self.plugins = plugins
        self.models: dict[str, RegisteredModel] = {}
        self._tables = {hook: _Table(kind, plugins) for hook, kind in _KINDS.items()}
        plugins.when_rejected.append(self._forget)
        for plugin in tuple(plugins.loaded):
            try:
                self._take(plugin)
            except PluginError as error:
                plugins.reject(plugin, error)
        self._remember()

    def _take(self, plugin: Plugin) -> None:
        """Check everything that *plugin* provides, and only then enter it."""
        specs = self._models_of(plugin)
        offers = {hook: self._offers_of(plugin, hook) for hook in _KINDS}
        self.models.update({spec.key: RegisteredModel(spec, plugin) for spec in specs})
        for hook, found in offers.items():
            self._tables[hook].offers.update({name: _Offer(target, plugin) for name, target in found.items()})

    def _forget(self, plugin: Plugin) -> None:
        """*plugin* was rejected, perhaps long after it was entered: nothing of it stays."""
        for key in [key for key, model in self.models.items() if model.plugin is plugin]:
            del self.models[key]
        for table in self._tables.values():
            table.offers = {name: offer for name, offer in table.offers.items() if offer.plugin is not plugin}

    def _models_of(self, plugin: Plugin) -> list[ModelSpec]:
        specs: dict[str, ModelSpec] = {}
        for result in self.plugins.call(plugin, "mstar_models"):
            if not isinstance(result, Sequence) or not all(isinstance(spec, ModelSpec) for spec in result):
                raise PluginError(f"mstar_models must return a list of ModelSpec, not {shown(result)}")
            for spec in result:
                for name, fault in spec_faults(spec):
                    raise PluginError(f"mstar_models: {name} of ModelSpec {shown(spec.key)}: {fault}")
                if spec.key in specs:
                    raise PluginError(f"mstar_models returned the key {spec.key!r} twice")
                if spec.key in self.models:
                    raise _taken(f"model key {spec.key!r}", plugin, self.models[spec.key].plugin)
                specs[spec.key] = spec
        return list(specs.values())

    def _offers_of(self, plugin: Plugin, hook: str) -> dict[str, str]:
        offers: dict[str, str] = {}
        for result in self.plugins.call(plugin, hook):
            if not isinstance(result, dict) or not all(_is_offer(name, target) for name, target in result.items()):
                raise PluginError(f"{hook} must return a dict of name to 'module:Class', not {shown(result)}")
            offers.update(result)
        for name in offers:
            if name in self._tables[hook].offers:
                raise _taken(f"{_KINDS[hook]} {name!r}", plugin, self._tables[hook].offers[name].plugin)
        return offers

    @property
    def hook(self) -> Any:
        """pluggy's hook relay, for observers: ``registry.hook.mstar_step_done(...)``."""
        return self.plugins.hook

    def model(self, key: str) -> ModelSpec:
        """The model that ``mstar serve KEY`` means.

        :raises PluginError: the plugin that should provide it is not used; its own exception is the cause.
        :raises SetupError: there is none. Names the nearest key, and the causes of broken plugins, one of which may
            have been meant to provide it.
        """
        if key not in self.models:
            self._blame(key)
            hint = nearest(key, self.models) or "; no plugin provides any model: try `pip install mstar-demo`"
            raise SetupError(f"there is no model {key!r}{hint}{describe_broken(self.plugins.broken)}")
        return self.models[key].spec

    def _blame(self, key: str) -> None:
        """Raise with the fault of the plugin that *key* belongs to, if it can be told which one that is."""
        known = recall(self.plugins.memory) if self.plugins.memory else {}
        for broken in self.plugins.broken:
            offered = known[broken.name]["keys"] if broken.name in known else []
            if key in offered or _is_named_after(key, broken.name):
                raise PluginError(f"model {key!r} is not available: {broken}") from broken.error
        loaded = {plugin.name for plugin in self.plugins.loaded}
        for name, plugin in known.items():
            if key not in plugin["keys"] or name in loaded:
                continue
            if name in self.plugins.blocked:
                why = "which MSTAR_PLUGINS or MSTAR_BLOCK_PLUGINS leaves out"
            else:
                why = f"which is not installed any more; run `pip install {plugin['distribution']}`"
            raise PluginError(f"model {key!r} is not available: it belongs to plugin {name!r}, {why}")

    def _remember(self) -> None:
        if self.plugins.memory is None:
            return
        working = {
            plugin.name: Remembered(
                distribution=plugin.distribution,
                keys=sorted(key for key, model in self.models.items() if model.plugin is plugin),
            )
            for plugin in self.plugins.loaded
            if plugin.distribution is not None
        }
        remember(self.plugins.memory, working)

    def names(self, hook: str) -> list[str]:
        """What plugins provide through *hook* (``"mstar_executors"``), by name; nothing is imported."""
        return sorted(self._tables[hook].offers)

    def require(self, hook: str, name: str) -> None:
        """Check that a plugin provides *name* through *hook*; nothing is imported.

        :raises SetupError: none does; names the nearest one and lists what exists.
        """
        self._tables[hook].require(name)

    def resource(self, kind: str) -> type[Resource]:
        """The class of a resource kind."""
        found: type[Resource] = self._tables["mstar_resources"].load(kind)
        return found

    def attention_backends(self) -> dict[str, Any]:
        """All attention backends that can be imported here, by name. One that cannot (its library is for another
        device, or is not installed) is logged and left out."""
        table, found = self._tables["mstar_attention_backends"], {}
        for name in table.offers:
            try:
                found[name] = table.load(name)
            except PluginError as error:
                log.warning("%s", error)
        return found

    def unusable_attention_backends(self) -> dict[str, str]:
        """Those that cannot be imported here, and why."""
        table, found = self._tables["mstar_attention_backends"], {}
        for name in table.offers:
            try:
                table.load(name)
            except PluginError as error:
                found[name] = str(error)
        return found

    def runner(self, name: str) -> Any:
        """The :class:`mstar.engine.base.Runner` class of an engine."""
        return self._tables["mstar_engines"].load(name)

    def scheduler(self, name: str) -> type[Scheduler]:
        """The class of a scheduling policy."""
        found: type[Scheduler] = self._tables["mstar_schedulers"].load(name)
        return found

    def executor(self, name: str) -> type[Executor]:
        """The class of an executor."""
        found: type[Executor] = self._tables["mstar_executors"].load(name)
        return found

    def weight_source(self, name: str) -> Any:
        """The :class:`mstar.weights.sources.WeightSource` class of a weight source."""
        return self._tables["mstar_weight_sources"].load(name)


def _taken(what: str, late: Plugin, early: Plugin) -> PluginError:
    remedy = f"uninstall one of the two, or leave one out: MSTAR_BLOCK_PLUGINS={late.name}"
    if early.name != BUILTIN:
        remedy += f" (or {early.name})"
    return PluginError(f"{what} is taken by plugin {early.name!r}", remedy=remedy)


def _is_named_after(key: str, plugin: str) -> bool:
    """``qwen3.5-4b`` is a model that a plugin called ``qwen3`` (or ``qwen``, but not ``q``) would have."""
    head, name = canonical(plugin).removeprefix("mstar-"), canonical(key)
    return name.startswith(head) and not name[len(head) :][:1].isalpha()


def _is_offer(name: Any, target: Any) -> bool:
    return isinstance(name, str) and isinstance(target, str) and ":" in target
