"""A noise level as a vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["time_waves"]


def time_waves(times: Tensor, width: int, max_period: float = 10_000.0) -> Tensor:
    """Cosines, then sines, of *times* ``[rows]`` at falling frequencies: float32 ``[rows, width]`` (*width* is
    even)."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times[:, None].float() * torch.exp(-math.log(max_period) * steps / half)
    return torch.cat((angles.cos(), angles.sin()), -1)
