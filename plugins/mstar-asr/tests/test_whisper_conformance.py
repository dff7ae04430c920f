"""The contract of models and plugins, on tiny random Whispers."""

from __future__ import annotations

from mstar.testing import FamilyConformance, PluginConformance


class TestMultilingual(FamilyConformance):
    key = "whisper_base"


class TestEnglishOnly(FamilyConformance):
    key = "whisper_tiny_en"


class TestPlugin(PluginConformance):
    plugin = "mstar-asr"
