from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for seeing


@pytest.fixture(scope="session")
def qwen3() -> Any:
    """A registry with this package in it, installed or not."""
    from mstar.testing.conformance.subject import open_registry

    return open_registry("mstar_qwen3.plugin")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints: ``whole`` (tied) and ``text`` (the language model's own layout, untied)."""
    from mstar_qwen3.tiny import write, write_text

    root = tmp_path_factory.mktemp("qwen3_5")
    write(root / "whole")
    write_text(root / "text")
    return {name: root / name for name in ("whole", "text")}
