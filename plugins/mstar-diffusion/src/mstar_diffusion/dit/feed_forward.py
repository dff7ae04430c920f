"""What a block does with each token alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mstar_diffusion.exact import Activation

__all__ = ["SwiGLU"]


class SwiGLU(Activation):
    """``silu(first half) * second half`` of the last dimension (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
