"""Processes for all tests of this folder: starting them costs more than what they compute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mstar.testing.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running
