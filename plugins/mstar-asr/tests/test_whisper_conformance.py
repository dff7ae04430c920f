"""The contract of models and plugins, on a tiny random Whisper. (English-only ones differ in prompts alone.)"""

from __future__ import annotations

from mstar.testing import FamilyConformance, PluginConformance


class TestWhisper(FamilyConformance):
    key = "whisper_base"


class TestPlugin(PluginConformance):
    plugin = "mstar-asr"
