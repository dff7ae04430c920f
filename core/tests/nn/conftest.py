"""What the cases of kernels (``cuda_*_cases.py``) have in common."""

from __future__ import annotations

import pytest

from mstar.testing.kernels import mend_interpreter


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch)
