"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.nn import ops

__all__ = ["LayerNorm", "OffsetRMSNorm", "RMSNorm"]


class LayerNorm(nn.Module):
    """:class:`torch.nn.LayerNorm` beside a residual stream: what a block adds to the stream is added in the same
    kernel. Computes what :func:`mstar.nn.ops.add_layer_norm` says."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """*x* ``[N, size]``, of the weight's dtype. :param delta: added to *x* first, in place."""
        return ops.add_layer_norm(x, delta, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, any leading shape (Zhang & Sennrich 2019)."""

    dtype: torch.dtype | None = None
    """Of the result; ``None``: the weight's."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None, following: Tensor | None = None) -> Tensor:
        """*x* may be float32 whatever the weight's dtype; the result has :attr:`dtype`.

        :param delta: added to *x* first, in place. :param following: the weight of the product that comes next, which
            a GPU may begin to read.
        """
        return ops.add_rms_norm(x, delta, self.weight, self.eps, self.dtype, following)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """An :class:`RMSNorm` whose weights are published as what is to be added to 1 (Gemma, Qwen3.5).

    The sum is kept in float32: in bfloat16 it would lose what the published number has more precision for. A model with
    such norms loads them as float32 (``WeightMap.float32``) and calls :meth:`add_one` from ``Model.loaded``.

    :param dtype: of the result, the model's.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__(size, eps)
        self.dtype = dtype

    def add_one(self) -> None:
        """From the published weights to those that are multiplied by."""
        self.weight.add_(1)
