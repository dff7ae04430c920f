"""A picture decoded in tiles, where memory is short: tiles overlap, and in the overlap one fades into the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["decoded_in_tiles", "starts"]

OVERLAP = 4
"""One part in so many of a tile's side is shared with each neighbour."""


def starts(length: int, tile: int) -> list[int]:
    """Where tiles of *tile* points begin that cover *length* points, a quarter of a tile or more overlapping."""
    if length <= tile:
        return [0]
    stride = tile - tile // OVERLAP
    count = -(-(length - tile) // stride) + 1
    return [round(number * (length - tile) / (count - 1)) for number in range(count)]


def decoded_in_tiles(decode: Callable[[Tensor], Tensor], latent: Tensor, tile: int, factor: int) -> Tensor:
    """``decode(latent)`` for a picture of one row, *tile* x *tile* latent points at a time.

    *latent* ``[1, C, h, w]``; *decode* gives *factor* pixels along a side of a point. The tiles' borders differ a
    little from the whole picture's, since a tile sees nothing beyond them; fading hides it.
    """
    height, width = latent.shape[2:]
    total, weight = None, torch.zeros(1, 1, height * factor, width * factor, device=latent.device)
    for top in starts(height, tile):
        for left in starts(width, tile):
            piece = decode(latent[:, :, top : top + tile, left : left + tile])
            fade = _fade(piece.shape[2], latent.device)[:, None] * _fade(piece.shape[3], latent.device)
            if total is None:
                total = torch.zeros(1, piece.shape[1], *weight.shape[2:], device=latent.device)
            place = (
                ...,
                slice(top * factor, top * factor + piece.shape[2]),
                slice(left * factor, left * factor + piece.shape[3]),
            )
            total[place] += piece.float() * fade
            weight[place] += fade
    assert total is not None
    return (total / weight).to(latent.dtype)


def _fade(length: int, device: torch.device) -> Tensor:
    """Rises from the first pixel over the part that neighbours share, and falls again: float32 ``[length]``, above
    0."""
    shared = max(1, length // OVERLAP)
    rise = (torch.arange(length, device=device) + 0.5) / shared
    return torch.minimum(rise, rise.flip(0)).clamp(max=1.0)
