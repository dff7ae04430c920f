"""The contract of models, on tiny random checkpoints of all four variants of Qwen3-TTS."""

from __future__ import annotations

from mstar.testing import FamilyConformance


class TestSmall(FamilyConformance):
    key = "qwen3_tts"
    plugin = "mstar_tts.plugin"


class TestCustomVoice(FamilyConformance):
    key = "qwen3_tts_1p7b"
    plugin = "mstar_tts.plugin"


class TestVoiceDesign(FamilyConformance):
    key = "qwen3_tts_voicedesign"
    plugin = "mstar_tts.plugin"


class TestBase(FamilyConformance):
    key = "qwen3_tts_base"
    plugin = "mstar_tts.plugin"
