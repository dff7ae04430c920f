"""Rotary position embedding (Su et al. 2021) in Llama's half-split layout, with the usual long-context variants."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.config import RopeConfig

__all__ = ["Rotary", "Rotation", "inverse_frequencies"]


class Rotation(NamedTuple):
    """Cosine and signed sine of one step's tokens, shared by all layers; ``[N, 1, head_dim]`` in the model's dtype.

    The first half of *sin* is negated, so that a rotation is ``x * cos + swap_halves(x) * sin``.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, heads: Tensor, turning: int | None = None) -> Tensor:
        """Rotate the first *turning* of *heads* ``[N, H, head_dim]`` (default: all); *heads* may be overwritten.

        :returns: ``[N, turning, head_dim]``.
        """
        return ops.rotate(heads, heads.shape[1] if turning is None else turning, self.cos, self.sin)


class Rotary(nn.Module):
    """Turns positions into a :class:`Rotation`, once per step.

    Angles are computed from the positions in float32, as the reference implementations do. A table over all positions
    would save a small operation a step, and cost 64 MB at 128k positions.
    """

    inverse: Tensor

    def __init__(self, head_dim: int, config: RopeConfig):
        super().__init__()
        self.head_dim, self.config = head_dim, config
        self.register_buffer("inverse", self.compute_buffers(None)["inverse"], persistent=False)
        self.scale = attention_factor(config)

    def compute_buffers(self, device: torch.device | None) -> dict[str, Tensor]:
        """What the loader fills in after a build on the meta device.

        ``inverse``: float32 ``[head_dim]``, each frequency twice, negated in the first half (cosine is even, and sine
        takes the sign that the rotation wants).
        """
        frequencies = inverse_frequencies(self.head_dim, self.config)
        return {"inverse": torch.cat((-frequencies, frequencies)).to(device or torch.get_default_device())}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """*positions*: integers ``[N]``."""
        return Rotation(*ops.rotation(positions, self.inverse, self.scale, dtype))


def inverse_frequencies(head_dim: int, config: RopeConfig) -> Tensor:
    """Radians per position, float32 ``[head_dim / 2]`` on the CPU, fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / config.theta**exponents
    scaling = config.scaling or {}
    if config.kind == "linear":  # position interpolation, Chen et al. 2023
        return plain / float(scaling["factor"])
    if config.kind == "llama3":
        return _llama3(plain, scaling)
    if config.kind == "yarn":
        return _yarn(plain, head_dim, config.theta, scaling)
    return plain


def attention_factor(config: RopeConfig) -> float:
    """What cosine and sine are multiplied by: 1 but for YaRN, which sharpens attention over long contexts."""
    scaling = config.scaling or {}
    if config.kind != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(factor, scaling["mscale"]) / _mscale(factor, scaling["mscale_all_dim"])
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, scaling: Any) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched, short ones kept, those between blended."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / factor


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: Any) -> Tensor:
    """YaRN (Peng et al. 2023), "NTK by parts": frequencies that turn often within the original context are kept, those
    that turn seldom are interpolated, with a linear ramp over the dimensions between."""
    original = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / float(scaling["factor"])
