"""What a block does with each token alone."""

from __future__ import annotations

from torch import Tensor

from mstar.nn.ops.modulate import swiglu
from mstar_diffusion.exact import Activation

__all__ = ["SwiGLU"]


class SwiGLU(Activation):
    """``silu(first half) * second half`` of the last dimension; see :func:`mstar.nn.ops.modulate.swiglu`."""

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        return swiglu(x, before)
