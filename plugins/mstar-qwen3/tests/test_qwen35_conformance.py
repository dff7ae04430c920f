"""The contract of models, on a tiny random checkpoint."""

from __future__ import annotations

from mstar.testing import FamilyConformance


class TestQwen35(FamilyConformance):
    key = "qwen3_5_4b"
    plugin = "mstar_qwen3.plugin"
