"""Codes and vectors: the residual codebooks of the codec's two halves.

A codebook is published as sums over clusters and how often each was used; the vectors are their quotients, computed
once when the weights are in. The first code of a frame has a quantiser of its own (``semantic``), the others share one.

References: ``qwen_tts`` 0.1.1 (decoder), ``transformers`` 4.57.3's Mimi (encoder). Residual vector quantisation:
Zeghidour et al., 2021.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SplitQuantizer", "vectors"]

_RARE = 1e-5


def vectors(total: Tensor, usage: Tensor) -> Tensor:
    """A codebook ``[codes, width]`` of the sums *total* ``[codes, width]`` over *usage* ``[codes]`` members."""
    return total / usage.clamp(min=_RARE)[:, None]


class _Codebook(nn.Module):
    def __init__(self, codes: int, width: int):
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(codes), requires_grad=False)
        self.embedding_sum = nn.Parameter(torch.zeros(codes, width), requires_grad=False)


class _Layer(nn.Module):
    def __init__(self, codes: int, width: int):
        super().__init__()
        self._codebook = _Codebook(codes, width)

    def table(self) -> Tensor:
        return vectors(self._codebook.embedding_sum, self._codebook.cluster_usage)


class _Layers(nn.Module):
    def __init__(self, count: int, codes: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(codes, width) for _ in range(count))


class _Residual(nn.Module):
    """Codebooks whose vectors are added up."""

    first: Tensor

    def __init__(self, count: int, codes: int, width: int):
        super().__init__()
        self.codes, self.count = codes, count
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)
        self.vq = _Layers(count, codes, width // 2)

    def settle(self) -> None:
        table = torch.cat([layer.table() for layer in self.vq.layers])  # type: ignore[operator]
        self.table = nn.Parameter(table, requires_grad=False)
        first = torch.arange(self.count, device=table.device) * self.codes  # of each codebook in the table
        self.register_buffer("first", first, persistent=False)
        del self.vq

    def forward(self, codes: Tensor) -> Tensor:
        """*codes* ``[rows, C, count]`` to ``[rows, C, width]``."""
        rows = F.embedding(codes.clamp(0, self.codes - 1) + self.first, self.table)
        return F.linear(rows.sum(2), self.output_proj.weight[:, :, 0])


class SplitQuantizer(nn.Module):
    """Frames of codes to vectors. The published projections into the codebooks' space are not needed here.

    :param codes: of each codebook. :param count: codes a frame. :param width: of a frame's vector.
    """

    def __init__(self, codes: int, count: int, width: int):
        super().__init__()
        self.rvq_first = _Residual(1, codes, width)
        self.rvq_rest = _Residual(count - 1, codes, width)

    def forward(self, codes: Tensor) -> Tensor:
        """*codes*: integers ``[rows, C, count]``; to ``[rows, C, width]``."""
        y: Tensor = self.rvq_first(codes[:, :, :1]) + self.rvq_rest(codes[:, :, 1:])
        return y
