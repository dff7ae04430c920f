"""The contract of models, on a tiny random checkpoint."""

from __future__ import annotations

from mstar.testing import FamilyConformance


class TestQwen3ASR(FamilyConformance):
    key = "qwen3_asr"
