"""The worker's tests run in the plain loop and in the one that looks ahead: what a client sees is the same."""

from __future__ import annotations

import pytest

from mstar.worker import core


@pytest.fixture(params=["plain", "lookahead"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(core, "looks_ahead", lambda deployment, device: request.param == "lookahead")
    return str(request.param)
