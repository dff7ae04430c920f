from __future__ import annotations

import pytest

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings


@pytest.fixture(scope="session")
def asr() -> Registry:
    """The registry with this package's models, installed or not."""
    installed = load_plugins(Settings())
    if "asr" in {plugin.name for plugin in installed.loaded}:
        return Registry(installed)
    return Registry(load_plugins(Settings(extra_plugins=("mstar_asr.plugin",))))
