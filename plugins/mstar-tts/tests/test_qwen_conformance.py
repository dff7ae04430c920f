"""The contract of models, on tiny random checkpoints of all four variants of Qwen3-TTS. They are one model class: all
checks run on the one that reads clips and on one that has voices."""

from __future__ import annotations

from mstar.testing import FamilyConformance, VariantConformance


class TestSmall(VariantConformance):
    key = "qwen3_tts"
    plugin = "mstar_tts.plugin"


class TestCustomVoice(FamilyConformance):
    key = "qwen3_tts_1p7b"
    plugin = "mstar_tts.plugin"


class TestVoiceDesign(VariantConformance):
    key = "qwen3_tts_voicedesign"
    plugin = "mstar_tts.plugin"


class TestBase(FamilyConformance):
    key = "qwen3_tts_base"
    plugin = "mstar_tts.plugin"
