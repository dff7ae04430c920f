"""Random numbers that follow from a row's key and their place alone, on any device and in any batch.

The numbers are those of a SplitMix64 generator (Steele, Lea and Flood, 2014), made normal in pairs (Box and Muller,
1958). Computed on the device in 64-bit integers, so that a captured graph draws afresh for each key.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

__all__ = ["normal"]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_STEP, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def normal(keys: Tensor, count: int, first: Tensor | None = None) -> Tensor:
    """Standard normal numbers, float32 ``[rows, count]``. *keys*: int64 ``[rows]``; number *i* of a row is the same
    whatever *count* is.

    :param first: int64 ``[rows]``, even: the number that each row begins with; default 0. So a part of a row is what
        it is in the whole.
    """
    pairs = torch.arange(1, (count + 1) // 2 + 1, device=keys.device)
    numbers = pairs[None] if first is None else first[:, None] // 2 + pairs
    z = keys[:, None] + numbers * _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    radius = ((_shifted(z, 40) + 1).float() * 2.0**-24).log().mul(-2).sqrt()
    angle = (z & 0xFFFFFF).float() * (2.0**-24 * 2 * pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 2).flatten(1)[:, :count]
