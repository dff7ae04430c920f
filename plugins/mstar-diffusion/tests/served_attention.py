"""A backend in the place of FlashInfer's, which runs on GPUs alone: PyTorch's, with plans that stay."""

from __future__ import annotations

import pytest

from mstar.resources.attention import RaggedPlan
from mstar.resources.attention.torch_sdpa import TorchAttention

__all__ = ["Served"]


class Served(TorchAttention):
    name, priority = "flashinfer", -1
    capturable = capturable_chunks = capturable_beside = True
    asked: tuple[tuple[int, int], ...] = ()
    """Windows and their length, of steps that may be captured."""

    @classmethod
    def instead(cls, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("mstar.resources.attention.flashinfer.FlashInferAttention", cls)
        patch.setattr(cls, "asked", ())

    def plan_windows(self, windows: int, length: int) -> RaggedPlan | None:
        Served.asked += ((windows, length),)
        return self.plan_ragged([length] * windows, None, "")  # type: ignore[arg-type]
