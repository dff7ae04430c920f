"""Rotary positions on several axes (frame, row, column, place in the text), interleaved pairs.

A head's pairs are divided among the axes; each axis turns its own by its coordinate. Tables are computed in float64 and
rounded once, as the reference implementations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mstar.nn.sequence import SequenceShards

__all__ = ["AxesRope", "Turn", "grid", "line"]


class Turn(NamedTuple):
    """Cosines and sines of one row's tokens, the same for all rows of a step: float32 ``[tokens, head_dim / 2]``, as
    :func:`mstar.nn.ops.modulate.turn_heads` wants them."""

    cos: Tensor
    sin: Tensor

    def join(self, *others: Turn) -> Turn:
        """The turns of these tokens and those of *others*, one after the other."""
        parts = (self, *others)
        return Turn(torch.cat([part.cos for part in parts]), torch.cat([part.sin for part in parts]))

    def part(self, start: int, end: int | None = None) -> Turn:
        """The turns of some of these tokens."""
        return Turn(self.cos[start:end], self.sin[start:end])

    def own(self, shards: SequenceShards, part: int) -> Turn:
        """The turns of this rank's stretch of part *part*, which these are."""
        return Turn(shards.own(self.cos, part, 0), shards.own(self.sin, part, 0))


class AxesRope(nn.Module):
    """Turns coordinates into :class:`Turn`.

    :param dims: of a head, how many numbers each axis turns; they are even. :param theta: base of each axis'
        geometric series of frequencies.
    """

    frequencies: Tensor

    def __init__(self, dims: Sequence[int], theta: float):
        super().__init__()
        self.dims, self.theta = tuple(dims), float(theta)
        self.register_buffer("frequencies", self.compute_buffers(None)["frequencies"], persistent=False)

    def compute_buffers(self, device: torch.device | None) -> dict[str, Tensor]:
        """``frequencies``: radians a position, float64 ``[head_dim / 2]``; see :func:`mstar.weights.loader.load`."""
        parts = [
            1.0 / self.theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim) for dim in self.dims
        ]
        return {"frequencies": torch.cat(parts).to(device or torch.get_default_device())}

    def forward(self, places: Tensor) -> Turn:
        """*places*: integers ``[tokens, axes]``."""
        axes = [places[:, axis : axis + 1].expand(-1, dim // 2) for axis, dim in enumerate(self.dims)]
        return self.turned(torch.cat(axes, 1).double() * self.frequencies)

    def turned(self, angles: Tensor) -> Turn:
        """*angles*: float64 ``[tokens, head_dim / 2]``."""
        return Turn(angles.cos().float(), angles.sin().float())


def grid(height: int, width: int, device: torch.device, *, before: Sequence[int] = (0,), after: int = 0) -> Tensor:
    """Coordinates of a picture's tokens, row by row: int64 ``[height * width, axes]``.

    :param before: the coordinates on the axes before row and column. :param after: how many axes follow, at 0.
    """
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None].expand(height, width)
    fixed = [torch.full_like(rows, place) for place in before]
    return torch.stack([*fixed, rows, columns, *[torch.zeros_like(rows)] * after], -1).flatten(0, 1)


def line(length: int, axes: int, axis: int, device: torch.device, start: int = 0) -> Tensor:
    """Coordinates *start*, *start* + 1… on one of *axes* axes, 0 on the others: int64 ``[length, axes]``."""
    places = torch.zeros(length, axes, dtype=torch.int64, device=device)
    places[:, axis] = torch.arange(start, start + length, device=device)
    return places
