"""Rows of a step, together or one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["row_by_row"]


def row_by_row(function: Callable[..., Tensor], *values: Tensor | None) -> Tensor:
    """``function(*values)``, whose rows do not see each other; *values* are ``[rows, …]``, the first is a tensor.

    On the CPU each row is computed by itself: a picture's thousands of tokens gain nothing from more of them, and
    products of one size give a row the same bits whatever else is in its step (promise P6, exactly).
    """
    first = values[0]
    assert first is not None
    if first.device.type != "cpu" or first.shape[0] == 1:
        return function(*values)
    rows = range(first.shape[0])
    return torch.cat([function(*(None if v is None else v[row : row + 1] for v in values)) for row in rows])
