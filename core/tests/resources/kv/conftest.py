import sys
from pathlib import Path
from typing import Any

import pytest

# Test helpers beside the tests: the suite is collected with importlib, which adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=["torch_sdpa", "numba_cpu", "flashinfer"])
def attention_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_flashinfer
    import kv_reference

    if request.param == "flashinfer":
        fake_flashinfer.install(monkeypatch)
        monkeypatch.setattr("mstar.resources.attention.flashinfer_rows._LONG", 4)  # small steps use fa3 too
    monkeypatch.setattr(kv_reference, "backend_in_use", request.param)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for FlashInfer's library (:class:`fake_flashinfer.Fake`)."""
    import fake_flashinfer

    return fake_flashinfer.install(monkeypatch)
