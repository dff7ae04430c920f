"""Mixtures of experts: each token goes through the few feed-forward networks that a router chooses for it.

Source: "Mixtral of Experts" (Jiang et al. 2024, arXiv:2401.04088) and the Qwen3 technical report (arXiv:2505.09388);
names and arithmetic are those of transformers 5.24 (``modeling_qwen3_moe.py``). No token is dropped: there are no
capacities.

Under tensor parallelism each rank has some of the experts, whole, and computes what they give to all tokens; the sum
over the ranks is the layer's. The router is on every rank, and gives the same on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.linear import Linear
from mstar.nn.mesh import Group, current_mesh
from mstar.nn.norm import RMSNorm
from mstar.nn.shards import Division, Part, Share, share

__all__ = ["Chosen", "Experts", "MoE", "choose"]


_ALIGNED = 8
"""Features of which a grouped product wants a multiple: 16 bytes."""


class Chosen(NamedTuple):
    """The experts of each token, int64 ``[N, k]``, and how much each counts, float32 ``[N, k]``."""

    experts: Tensor
    weights: Tensor


def choose(logits: Tensor, active: int, normalized: bool) -> Chosen:
    """The *active* likeliest experts of each token by the router's *logits* ``[N, experts]``. They count by their
    probabilities among all experts; *normalized*: scaled so that these sum to one."""
    weights, experts = logits.float().softmax(-1).topk(active, -1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return Chosen(experts, weights)


class _Stacked(nn.Module):
    """One matrix of each of this rank's experts: *weight* ``[experts, out, in]``, of published *parts* one under the
    other (name → output features)."""

    def __init__(self, held: Share, experts: int, parts: dict[str, int], in_features: int):
        super().__init__()
        self._held, self._experts, self._count, self._parts = held, experts, held.length, parts
        self.out_features, self.in_features = sum(parts.values()), in_features
        # the loader fills rows
        self.weight = nn.Parameter(torch.empty(held.length * self.out_features, in_features), requires_grad=False)

    def published_parts(self, name: str) -> Iterator[Part]:
        start = 0
        for expert in range(self._experts):
            held = self._held.first <= expert < self._held.first + self._held.length
            for part, rows in self._parts.items():
                yield Part(f"{expert}.{part}", start, rows if held else 0)
                start += rows if held else 0

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """*x* ``[M, in]``: the tokens of each expert, one expert's after the other's, up to *ends* int32 ``[experts]``.

        :returns: ``[M, out]``; what stands behind the last end is anything.
        """
        weight = self.weight.view(self._count, self.out_features, self.in_features)
        aligned = self.in_features % _ALIGNED == 0 and self.out_features % _ALIGNED == 0
        if x.is_cuda and x.dtype == torch.bfloat16 and aligned:
            return _grouped(x, weight.transpose(1, 2), ends)
        out, start = x.new_zeros(x.shape[0], self.out_features), 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
            start = end
        return out


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One kernel for all experts, which reads the ends on the device: it can be captured."""
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch before 2.10 has it under that name
    out: Tensor = grouped(x, weight, offs=ends)
    return out


class Experts(nn.Module):
    """The experts ``down(silu(gate(x)) * up(x))``, of which this rank has a share."""

    def __init__(self, hidden: int, intermediate: int, experts: int, *, tp: Group | None = None):
        super().__init__()
        self.tp = tp or current_mesh().tp
        self.divisions = (Division("experts", experts),)
        held = share(experts, self.tp)
        self.first, self.count = held
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = _Stacked(held, experts, parts, hidden)
        self.down_proj = _Stacked(held, experts, {"down_proj": hidden}, intermediate)

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        """*x* ``[N, hidden]`` → the weighted sum of what each token's experts give, ``[N, hidden]``."""
        tokens, active = chosen.experts.shape
        own = (chosen.experts - self.first).flatten()
        own = own.masked_fill((own < 0) | (own >= self.count), self.count)  # others' come last, and count for nothing
        sorted_, order = own.sort(stable=True)
        experts = torch.arange(self.count, device=x.device)
        ends = torch.searchsorted(sorted_, experts, right=True).to(torch.int32)
        hidden = ops.silu_mul(self.gate_up_proj(x[order // active], ends))
        given = self.down_proj(hidden, ends)
        weights = chosen.weights.flatten()[order]
        held = (sorted_ < self.count).unsqueeze(1)
        # each pair back to where it stood, so that a token's sum has one order: its experts', likeliest first
        placed = torch.empty_like(given, dtype=torch.float32)
        placed[order] = torch.where(held, given.float() * weights.unsqueeze(1), 0.0)
        found: Tensor = self.tp.all_reduce(placed.view(tokens, active, -1).sum(1).to(x.dtype))
        return found


class MoE(nn.Module):
    """Router and experts in the place of a :class:`~mstar.nn.decoder.GatedMLP`; published under ``gate`` and
    ``experts.N``.

    :param active: experts of each token. :param normalized: see :func:`choose`.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        active: int,
        normalized: bool = True,
        *,
        tp: Group | None = None,
    ):
        super().__init__()
        self.active, self.normalized = active, normalized
        self.gate = Linear(hidden, experts)
        self.experts = Experts(hidden, intermediate, experts, tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        """*x*: normed ``[N, hidden]``."""
        return self.experts(x, choose(self.gate(x), self.active, self.normalized))  # type: ignore[no-any-return]

    def beside(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """``self(norm(x, delta))`` for the stream *x*; see :class:`~mstar.nn.decoder.DecoderLayer`."""
        return self(norm(x, delta))  # type: ignore[no-any-return]
