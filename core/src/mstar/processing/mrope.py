"""Positions on three axes of prompts with pictures and videos, for multimodal rope.

Source: "Qwen2-VL" (arXiv 2409.12191), section 2.1, and ``get_rope_index`` of transformers 5.24's Qwen3-VL, in which
each group of a video's frames is placed like a picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Grid", "rope_positions"]

Grid = tuple[int, int]
"""Rows and columns of a picture's embeddings."""


def rope_positions(runs: Sequence[int | Grid]) -> npt.NDArray[np.int64]:
    """Time, row and column of each token of a prompt, int64 ``[3, T]``.

    :param runs: the prompt's parts in order: so many tokens of text, or a picture's grid, ``rows * columns`` tokens.
    """
    parts, at = [np.zeros((3, 0), np.int64)], 0
    for run in runs:
        if isinstance(run, int):
            parts.append(np.broadcast_to(np.arange(at, at + run), (3, run)))
            at += run
            continue
        rows, columns = run
        row, column = np.divmod(np.arange(rows * columns), columns)
        parts.append(np.stack((np.zeros_like(row), row, column)) + at)
        at += max(rows, columns)
    return np.concatenate(parts, axis=1).astype(np.int64)
