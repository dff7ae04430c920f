"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598)."""

from __future__ import annotations

from torch import Tensor

__all__ = ["away_from", "towards"]


def away_from(cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """``cond + scale * (cond - uncond)`` in float32: 0 is no guidance. *cond*, *uncond* ``[rows, …]``; *scale*
    ``[rows]``."""
    cond, uncond = cond.float(), uncond.float()
    return cond + scale.view(-1, *[1] * (cond.ndim - 1)) * (cond - uncond)


def towards(cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """``uncond + scale * (cond - uncond)`` in float32: 1 is no guidance. Arguments as :func:`away_from`'s."""
    cond, uncond = cond.float(), uncond.float()
    return uncond + scale.view(-1, *[1] * (cond.ndim - 1)) * (cond - uncond)
