"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.nn import ops

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, any leading shape (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """*x* may be float32 whatever the weight's dtype; the result has the weight's.

        :param delta: added to *x* first, in place.
        """
        return ops.add_rms_norm(x, delta, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
