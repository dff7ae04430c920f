"""What ``pytest --mstar-plugin NAME`` collects."""

from __future__ import annotations

import pytest

from mstar.testing.conformance import FamilyConformance, PluginConformance
from mstar.testing.conformance.subject import find_plugin, models_of, open_registry
from mstar.spec.errors import SetupError, nearest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One instance of each check per model of the plugin."""
    if "mstar_key" not in metafunc.fixturenames:
        return
    name = metafunc.config.getoption("mstar_plugin")
    registry = open_registry(name)
    try:
        found = models_of(registry, find_plugin(registry, name))
    except SetupError:
        found = []  # the plugin's own checks say what is wrong
    asked = metafunc.config.getoption("mstar_model")
    for key in asked:
        if found and key not in found:
            raise pytest.UsageError(f"--mstar-model {key}: plugin {name!r} has no such model{nearest(key, found)}")
    metafunc.parametrize("mstar_key", asked if asked and found else found, scope="class")


class TestPlugin(PluginConformance):
    """The plugin."""


class TestModel(FamilyConformance):
    """Each of its models."""
