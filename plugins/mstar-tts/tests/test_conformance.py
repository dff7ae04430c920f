"""The contract of models and plugins, on tiny random models."""

from __future__ import annotations

import pytest

from mstar.testing import FamilyConformance, PluginConformance
from mstar_tts.espeak import espeak

pronounced = pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed: no text can be pronounced")


class TestOrpheus(FamilyConformance):
    key = "orpheus"
    plugin = "mstar_tts.plugin"


@pronounced
class TestKokoro(FamilyConformance):
    key = "kokoro"
    plugin = "mstar_tts.plugin"


@pronounced
class TestPlugin(PluginConformance):
    plugin = "mstar_tts.plugin"
