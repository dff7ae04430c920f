"""The layers with a state: gated delta nets (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn.linear import ColumnWeight, MergedLinear, RowLinear
from mstar.nn.mesh import current_mesh
from mstar.nn.norm import RMSNorm
from mstar.nn.ops import delta as delta_ops
from mstar.nn.shards import Cut, Division, Part, shares
from mstar_qwen3.config import TextConfig

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(nn.Module):
    """A short causal convolution, and a matrix of *key_dim* × *value_dim* for each value head that forgets with each
    token and learns what it did not predict. The modules are the published ones, but for the projections of the input,
    which are one.

    :param index: which of the layers with a state it is.
    """

    def __init__(self, config: TextConfig, index: int):
        super().__init__()
        self.index, self.value_dim, self.eps = index, config.value_dim, config.norm_eps
        heads, keys, inner = (
            config.value_heads,
            config.key_heads * config.key_dim,
            config.value_heads * config.value_dim,
        )
        channels = (keys, keys, inner)
        self.in_proj = MergedLinear(
            config.hidden, {"in_proj_qkv": channels, "in_proj_z": inner, "in_proj_b": heads, "in_proj_a": heads}
        )
        self.conv1d = ColumnWeight(config.channels, (1, config.kernel), sections=channels)
        self._cut = Cut(0, heads, shares((heads,), current_mesh().tp))
        self.heads = self._cut.length
        self.divisions = (Division("key heads", config.key_heads), Division("value heads", heads))
        self.A_log = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.norm = RMSNorm(config.value_dim, config.norm_eps)
        self.out_proj = RowLinear(inner, config.hidden, unit=config.value_dim)

    def published_parts(self, name: str) -> Iterator[Part]:
        """Of what decays each head, which is this layer's own."""
        yield Part("", cut=None if self._cut.whole else self._cut)

    def beside(
        self, x: Tensor, delta: Tensor | None, norm: RMSNorm, spans: delta_ops.Spans, state: Any
    ) -> Tensor | None:
        """For the stream *x*; see :class:`mstar.nn.decoder.DecoderLayer`.

        :param state: the step's view of the recurrent state, tensors ``conv`` and ``delta``.
        """
        fused = self.in_proj.after(norm, x, delta)
        mixed, z, b, a = torch.split(fused, list(self.in_proj.widths.values()), 1)
        gate = z.view(z.shape[0], self.heads, self.value_dim)
        normed = delta_ops.gated_delta_net(
            mixed,
            a,
            b,
            self.conv1d.weight.squeeze(1),
            self.A_log,
            self.dt_bias,
            spans,
            state.slots("conv", self.index),
            state.slots("delta", self.index),
            delta_ops.GatedNorm(gate, self.norm.weight, self.norm.eps),
            self.out_proj.weight,
        )
        return self.out_proj.add_to(x, normed.flatten(1))
