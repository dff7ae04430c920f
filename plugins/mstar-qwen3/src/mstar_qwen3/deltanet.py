"""The layers with a state: gated delta nets (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn.linear import MergedLinear, RowLinear
from mstar.nn.norm import RMSNorm
from mstar.nn.ops import delta as delta_ops
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
        self.index, self.channels, self.heads = index, config.channels, config.value_heads
        self.eps = config.norm_eps
        inner = config.value_heads * config.value_dim
        self.value_dim = config.value_dim
        self.in_proj = MergedLinear(
            config.hidden,
            {"in_proj_qkv": config.channels, "in_proj_z": inner, "in_proj_b": self.heads, "in_proj_a": self.heads},
        )
        self.conv1d = _Taps(config.channels, config.kernel)
        self.A_log = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.norm = RMSNorm(config.value_dim, config.norm_eps)
        self.out_proj = RowLinear(inner, config.hidden)

    def beside(
        self, x: Tensor, delta: Tensor | None, norm: RMSNorm, spans: delta_ops.Spans, state: Any
    ) -> Tensor | None:
        """For the stream *x*; see :class:`mstar.nn.decoder.DecoderLayer`.

        :param state: the step's view of the recurrent state, tensors ``conv`` and ``delta``.
        """
        fused = self.in_proj.after(norm, x, delta)
        mixed, z, b, a = torch.split(fused, list(self.in_proj.parts.values()), 1)
        out = delta_ops.gated_delta_net(
            mixed,
            a,
            b,
            self.conv1d.weight.squeeze(1),
            self.A_log,
            self.dt_bias,
            spans,
            state.slots("conv", self.index),
            state.slots("delta", self.index),
        )
        gate = z.view(z.shape[0], self.heads, self.value_dim)
        normed = delta_ops.gated_rms_norm(out, gate, self.norm.weight, self.norm.eps)
        return self.out_proj.add_to(x, normed.flatten(1))


class _Taps(nn.Module):
    """A depthwise convolution's weight ``[channels, 1, kernel]``."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel), requires_grad=False)
