"""Rotary positions over three axes, of a part of each head.

Qwen3.5 rotates the first quarter of each head's elements, in pairs half of that quarter apart, and the pairs take turns
between time, height and width (interleaved M-RoPE, Qwen3-VL). The runtime's kernels rotate whole heads, in pairs half a
head apart. So heads are kept in another order (:func:`head_order`), in which Qwen3.5's pairs are half a head apart too,
and the elements that are not rotated turn by an angle of 0. Queries and keys in the same order have the same products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.rotary import Rotation, attention_factor, inverse_frequencies
from mstar_qwen3.config import TextConfig

__all__ = ["PartialRotary", "head_order"]


def head_order(head_dim: int, rotary_dims: int) -> Tensor:
    """int64 ``[head_dim]``: the published place of each element of a head as it is kept."""
    pairs, half = rotary_dims // 2, head_dim // 2
    rest = torch.arange(rotary_dims, head_dim, device="cpu")
    first, second = torch.arange(pairs, device="cpu"), torch.arange(pairs, rotary_dims, device="cpu")
    return torch.cat((first, rest[: half - pairs], second, rest[half - pairs :]))


class PartialRotary(nn.Module):
    """Turns positions into a :class:`~mstar.nn.rotary.Rotation` of heads in :func:`head_order`, once a step."""

    inverse: Tensor
    axes: Tensor

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        for name, buffer in self.compute_buffers(None).items():
            self.register_buffer(name, buffer, persistent=False)

    def compute_buffers(self, device: torch.device | None) -> dict[str, Tensor]:
        """What the loader fills in after a build on the meta device; each ``[head_dim]``.

        ``inverse``: float32, radians per position, negated in the first half. ``axes``: int64, the axis whose position
        counts.
        """
        config = self.config
        pairs, half = config.rotary_dims // 2, config.head_dim // 2
        inverse = torch.zeros(half, device="cpu")
        inverse[:pairs] = inverse_frequencies(config.rotary_dims, config.rope)
        axes = torch.zeros(half, dtype=torch.int64, device="cpu")
        for axis in (1, 2):  # the first axis has what the others leave
            axes[axis : 3 * config.sections[axis] : 3] = axis
        found = {"inverse": torch.cat((-inverse, inverse)), "axes": axes.repeat(2)}
        return {name: buffer.to(device or torch.get_default_device()) for name, buffer in found.items()}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """*positions*: integers ``[3, N]``."""
        factor = attention_factor(self.config.rope)
        if factor == 1.0:
            return Rotation(*ops.rotation(positions, self.inverse, 1.0, dtype, self.axes))
        cos, sin = ops.rotation(positions, self.inverse, factor, torch.float32, self.axes)
        # what is not rotated is not made longer either
        return Rotation(torch.where(self.inverse == 0, 1.0, cos).to(dtype), sin.to(dtype))
