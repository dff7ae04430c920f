from __future__ import annotations

import pytest

from mstar.worker import tensor_channel
from mstar.worker.tensor_channel import TensorChannel


@pytest.fixture(autouse=True)
def plugins_for_tests_change_their_own_processes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded in this one, too: what they put in the place of the tensors' way is put back."""
    for owner, name in (
        (tensor_channel, "LARGE_BYTES"),
        (tensor_channel, "_LONGEST_S"),
        (TensorChannel, "_launched"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
