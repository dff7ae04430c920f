"""How a noise level steers a block: what it normed is scaled and moved, what it adds is weighed.

The vectors are the same for all tokens of a row: ``[rows, 1, width]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.linear import Linear

__all__ = ["Modulation", "Shifted"]


class Modulation(NamedTuple):
    """Of one part of a block (Peebles & Xie 2023, "adaLN-Zero")."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Shifted(nn.Module):
    """``linear(silu(time))`` as *parts* modulations; one module serves all blocks of a kind."""

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.linear, self.parts = Linear(width, 3 * parts * width), parts

    def forward(self, time: Tensor) -> tuple[Modulation, ...]:
        """*time* ``[rows, width]``."""
        vectors = torch.chunk(self.linear(F.silu(time))[:, None], 3 * self.parts, -1)
        return tuple(Modulation(*vectors[3 * part : 3 * part + 3]) for part in range(self.parts))
