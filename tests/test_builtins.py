"""What the core registers by name exists, and is what its hook promises."""

from __future__ import annotations

import typing

import pytest

from mstar import builtin
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.settings import Settings

CONTRACTS = {
    "mstar_resources": "mstar.resources.base:Resource",
    "mstar_attention_backends": "mstar.resources.attention:AttentionBackend",
    "mstar_engines": "mstar.engine.base:Runner",
    "mstar_schedulers": "mstar.scheduler.base:Scheduler",
    "mstar_executors": "mstar.cluster.base:Executor",
    "mstar_weight_sources": "mstar.weights.sources:WeightSource",
}
OFFERS = [(hook, name, target) for hook in CONTRACTS for name, target in getattr(builtin, hook)().items()]


@pytest.mark.parametrize(("hook", "name", "target"), OFFERS, ids=lambda value: value.rpartition(":")[2])
def test_a_built_in_fulfils_its_contract(hook: str, name: str, target: str) -> None:
    found = load_object(target)
    if not isinstance(found, type):  # it makes one of several classes, which it says
        found = typing.get_type_hints(found)["return"]
        assert found is load_object(CONTRACTS[hook])
        return
    assert issubclass(found, load_object(CONTRACTS[hook]))
    assert not getattr(found, "__abstractmethods__", None), f"{name} leaves methods of its contract out"


def test_every_resource_spec_has_its_kind() -> None:
    import mstar.spec.resources as specs

    kinds = {getattr(specs, name).kind for name in specs.__all__} - {""}
    assert kinds == set(builtin.mstar_resources())


def test_the_installed_plugins_work() -> None:
    plugins = load_plugins(Settings())
    registry = Registry(plugins)
    assert [str(broken) for broken in plugins.broken] == []
    assert {"core", "server", "demo"} <= {plugin.name for plugin in plugins.loaded}
    assert registry.model("smollm2").licence.permissive
