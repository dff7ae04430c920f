"""Linear layers, named after how tensor parallelism cuts them, and the fused ones that read several published tensors.

A fused layer (:class:`MergedLinear`, :class:`QKVLinear`) has one parameter for several published ones, concatenated
along the output dimension: one matrix product instead of three. :mod:`mstar.weights.names` maps each published tensor
to its rows, so that the loader reads it straight into place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.norm import RMSNorm

__all__ = ["ColumnLinear", "LMHead", "Linear", "MergedLinear", "QKVLinear", "RowLinear", "VocabEmbedding"]

Product = Callable[[Tensor, Tensor | None], Tensor]


class Linear(nn.Module):
    """``x @ weight.T + bias``; *weight* ``[out_features, in_features]``, *x* ``[..., in_features]``.

    :ivar product: set by :func:`mstar.nn.cpu_linear.prepare_cpu` to a faster way to multiply; ``weight`` is empty then.
    :ivar deterministic: set by :func:`mstar.nn.deterministic.prepare_deterministic`: see :func:`mstar.nn.ops.linear`.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.product: Product | None = None
        self.deterministic = False

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            return self.product(x, self.bias)
        return ops.linear(x, self.weight, self.bias, self.deterministic)

    def after(self, norm: RMSNorm, x: Tensor, delta: Tensor | None) -> Tensor:
        """``self(norm(x, delta))``, in one kernel where there is one."""
        if delta is None and self.product is None:
            out = ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, self.deterministic)
            if out is not None:
                return out
        return self(norm(x, delta))  # type: ignore[no-any-return]

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """Add ``self(x)`` to *residual* in place where one kernel does both.

        :returns: what is still to be added: ``None`` or ``self(x)``.
        """
        if self.product is None and ops.add_linear(residual, x, self.weight, self.bias, self.deterministic):
            return None
        return self(x)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


class ColumnLinear(Linear):
    """Output features are what tensor parallelism divides: every rank computes some of them from the whole input."""


class RowLinear(Linear):
    """Input features are what tensor parallelism divides: every rank's product is a part of the sum."""


class MergedLinear(ColumnLinear):
    """Several column-parallel layers with one input, computed as one.

    :param parts: published module name → its output features, in the order of the output.
    :param bias: whether the parts have biases, or the names of those that do: the others' rows of the bias are 0.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool | Collection[str] = False):
        super().__init__(in_features, sum(parts.values()), bool(bias))
        self.parts = dict(parts)
        self.biased = frozenset(parts) if bias is True else frozenset(bias or ())
        if unknown := self.biased - self.parts.keys():
            raise ValueError(f"a bias for {sorted(unknown)}, which are none of the parts {list(self.parts)}")


class QKVLinear(MergedLinear):
    """Query, key and value projections with grouped heads; output ``[..., (heads + 2 * kv_heads) * head_dim]``."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool | Collection[str] = False,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ):
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        super().__init__(hidden, dict(zip(names, sizes, strict=True)), bias)


class VocabEmbedding(nn.Module):
    """Token ids (integers, any shape) → rows of *weight* ``[vocab, hidden]``."""

    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LMHead(ColumnLinear):
    """Hidden states ``[N, hidden]`` → logits ``[N, vocab]``. Given *tied*, it shares that embedding's parameter."""

    def __init__(self, hidden: int, vocab: int, tied: VocabEmbedding | None = None):
        super().__init__(hidden, vocab)
        if tied is not None:
            self.weight = tied.weight
