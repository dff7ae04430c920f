"""Pictures of latents as tokens, and back.

A token is a square of latent points. Families differ in the order of its numbers.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["channels_first", "channels_last", "from_channels_first", "from_channels_last"]


def channels_first(latent: Tensor, patch: int = 2) -> Tensor:
    """``[rows, C, H, W]`` to tokens ``[rows, H/patch, W/patch, C * patch * patch]``: of each channel its square."""
    rows, channels, height, width = latent.shape
    squares = latent.reshape(rows, channels, height // patch, patch, width // patch, patch)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3)


def from_channels_first(tokens: Tensor, patch: int = 2) -> Tensor:
    """Undoes :func:`channels_first`."""
    rows, height, width, _ = tokens.shape
    squares = tokens.reshape(rows, height, width, -1, patch, patch)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height * patch, width * patch)


def channels_last(latent: Tensor, patch: int = 2) -> Tensor:
    """``[rows, C, H, W]`` to tokens ``[rows, H/patch, W/patch, patch * patch * C]``: of each point its channels."""
    rows, channels, height, width = latent.shape
    squares = latent.reshape(rows, channels, height // patch, patch, width // patch, patch)
    return squares.permute(0, 2, 4, 3, 5, 1).flatten(3)


def from_channels_last(tokens: Tensor, patch: int = 2) -> Tensor:
    """Undoes :func:`channels_last`."""
    rows, height, width, _ = tokens.shape
    squares = tokens.reshape(rows, height, width, patch, patch, -1)
    return squares.permute(0, 5, 1, 3, 2, 4).reshape(rows, -1, height * patch, width * patch)
