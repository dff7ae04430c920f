"""The contract of models and plugins, on a tiny random SmolLM2."""

from __future__ import annotations

from mstar.testing import FamilyConformance, PluginConformance


class TestSmolLM2(FamilyConformance):
    key = "smollm2"


class TestPlugin(PluginConformance):
    plugin = "mstar-demo"
