"""What tests of several files need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark_modules() -> Iterator[None]:
    """The programs and folders of ``benchmarks`` can be imported."""
    folder = str(Path(__file__).parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
