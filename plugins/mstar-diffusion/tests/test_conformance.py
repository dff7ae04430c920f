"""The contract of models and plugins, on tiny random checkpoints."""

from __future__ import annotations

from mstar.testing import FamilyConformance, PluginConformance

PLUGIN = "mstar_diffusion.plugin"


class TestZImageTurbo(FamilyConformance):
    key = "z_image_turbo"
    plugin = PLUGIN


class TestFlux2Klein(FamilyConformance):
    key = "flux2_klein"
    plugin = PLUGIN


class TestPlugin(PluginConformance):
    plugin = PLUGIN
