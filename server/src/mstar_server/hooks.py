"""What plugins give the server: routers, adapters. A plugin that breaks the contract is put aside, the others serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

import mstar_server.plugin
from mstar.registry import load_object
from mstar.spec.errors import PluginError
from mstar.spec.model import ModelSpec
from mstar_server.options import ServerOptions
from mstar_server.protocols import Registry

__all__ = ["adapters", "routers"]

log = logging.getLogger("mstar.server")


def routers(registry: Registry) -> list[APIRouter]:
    """All routers, the server's own last: a path that another plugin mounts too is the other plugin's."""
    found: list[APIRouter] = []
    for plugin, offer in _offers(registry.plugins, "mstar_api", registry=registry):
        if isinstance(offer, list | tuple) and all(isinstance(router, APIRouter) for router in offer):
            found.extend(offer)
        else:
            _reject(registry, plugin, PluginError(f"mstar_api must return a list of APIRouter, not {offer!r:.80}"))
    return found


def adapters(registry: Registry, spec: ModelSpec, options: ServerOptions) -> dict[str, Any]:
    """The adapter of each of *spec*'s OpenAI abilities. A family's own wins over the server's."""
    found: dict[str, Any] = {}
    for plugin, offer in _offers(registry.plugins, "mstar_openai", spec=spec):
        try:
            if not isinstance(offer, Mapping):
                raise TypeError(f"it must return a dict of ability to 'module:Class', not {offer!r:.80}")
            made = {ability: load_object(name)(spec, options) for ability, name in offer.items()}
        except Exception as error:
            _reject(registry, plugin, PluginError(f"mstar_openai failed for {spec.key!r}: {error}"), error)
        else:
            found = made | found
    return found


def _offers(plugins: Any, hook: str, **arguments: Any) -> list[tuple[Any, Any]]:
    offers = plugins.call_each(hook, **arguments)
    return sorted(offers, key=lambda offer: offer[0].object is mstar_server.plugin)


def _reject(registry: Registry, plugin: Any, error: PluginError, cause: BaseException | None = None) -> None:
    log.error("plugin %r is not used: %s", plugin.name, error, exc_info=cause)
    registry.plugins.reject(plugin, error)
