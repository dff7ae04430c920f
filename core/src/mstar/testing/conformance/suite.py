"""What ``pytest --mstar-plugin NAME`` collects."""

from __future__ import annotations

import pytest

from mstar.spec.errors import SetupError, nearest
from mstar.testing.conformance import FamilyConformance, PluginConformance
from mstar.testing.conformance.subject import find_plugin, models_of, open_registry

_MODELS = pytest.StashKey[list[str]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One instance of each check per model of the plugin."""
    if "mstar_key" not in metafunc.fixturenames:
        return
    found = _models(metafunc.config)
    asked = metafunc.config.getoption("mstar_model")
    metafunc.parametrize("mstar_key", asked if asked and found else found, scope="class")


def _models(config: pytest.Config) -> list[str]:
    """The keys of the plugin's models. Looked up once: every check asks, and loading all plugins takes its time."""
    if _MODELS not in config.stash:
        name = config.getoption("mstar_plugin")
        registry = open_registry(name)
        try:
            found = models_of(registry, find_plugin(registry, name))
        except SetupError:
            found = []  # the plugin's own checks say what is wrong
        for key in config.getoption("mstar_model"):
            if found and key not in found:
                raise pytest.UsageError(f"--mstar-model {key}: plugin {name!r} has no such model{nearest(key, found)}")
        config.stash[_MODELS] = found
    return config.stash[_MODELS]


class TestPlugin(PluginConformance):
    """The plugin."""


class TestModel(FamilyConformance):
    """Each of its models."""
