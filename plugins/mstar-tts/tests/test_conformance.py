"""The contract of models and plugins, on a tiny random Kokoro."""

from __future__ import annotations

import pytest

from mstar.testing import FamilyConformance, PluginConformance
from mstar_tts.espeak import espeak

pytestmark = pytest.mark.skipif(espeak() is None, reason="espeak-ng is not installed: no text can be pronounced")


class TestKokoro(FamilyConformance):
    key = "kokoro"
    plugin = "mstar_tts.plugin"


class TestPlugin(PluginConformance):
    plugin = "mstar_tts.plugin"
