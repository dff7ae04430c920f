"""Calls the observers: the hooks that watch requests and steps and return nothing.

An observer that raises must not cost a request, and one that fails must not keep another from seeing what happened. So
each plugin is called by itself; its first failure in a hook is logged with the traceback, all are counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from mstar.plugins import Plugins

__all__ = ["Observers"]

log = logging.getLogger(__name__)


class Observers:
    """The plugins that implement some hooks, in the order in which pluggy calls them (the last loaded first).

    :param hooks: names of the hooks. Which plugins implement them is looked up once: a call that nobody listens to
        costs a look into a dictionary.
    """

    def __init__(self, plugins: Plugins, *hooks: str):
        self.failures: Counter[tuple[str, str]] = Counter()
        self._callers = {hook: _callers(plugins, hook) for hook in hooks}

    def add(self, name: str, listener: object) -> None:
        """Let *listener* watch too, before the plugins: the methods that it has of the hooks' names."""
        for hook, callers in self._callers.items():
            method = getattr(listener, hook, None)
            if method is not None:
                callers.insert(0, (name, method))

    def watched(self, hook: str) -> bool:
        """Whether any plugin implements *hook*."""
        return bool(self._callers[hook])

    def call(self, hook: str, **arguments: Any) -> None:
        """Tell every observer. Never raises for what an observer does."""
        for plugin, caller in self._callers[hook]:
            try:
                caller(**arguments)
            except Exception:
                self.failures[plugin, hook] += 1
                if self.failures[plugin, hook] == 1:
                    log.exception("plugin %r failed in %s; further failures there are counted only", plugin, hook)

    def report(self) -> dict[str, int]:
        """``{"plugin hook": failures}``, for the worker's status."""
        return {f"{plugin} {hook}": count for (plugin, hook), count in self.failures.items()}


def _callers(plugins: Plugins, hook: str) -> list[tuple[str, Callable[..., Any]]]:
    objects = [plugin for _, plugin in plugins.manager.list_name_plugin() if plugin is not None]
    return [
        (
            impl.plugin_name,
            plugins.manager.subset_hook_caller(hook, [other for other in objects if other is not impl.plugin]),
        )
        for impl in reversed(getattr(plugins.hook, hook).get_hookimpls())
    ]
