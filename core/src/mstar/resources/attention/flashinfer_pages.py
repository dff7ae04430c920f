"""A step's page tables in the form that FlashInfer reads: compressed rows (``indptr`` and ``indices``), int32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["PageList", "kernel_page", "leading_ones", "list_pages", "room", "split_packed"]

_Ints = npt.NDArray[np.int64]

_LARGEST_PAGE = 64
"""FlashInfer divides a context among its thread blocks by whole pages: larger ones would leave most of a GPU idle."""


@dataclass(slots=True)
class PageList:
    """Rows of a step on the host.

    :param packed: int32: where each row's queries begin ``[rows + 1]``, where its pages begin ``[rows + 1]``, tokens in
        its last page ``[rows]``, all pages. One array, so that it goes to the device in one copy.
    :param kv_lengths: int32 ``[rows]``, tokens of context that each row attends to.
    """

    rows: int
    queries: int
    packed: npt.NDArray[np.int32]
    kv_lengths: npt.NDArray[np.int32]

    def host(self) -> tuple[Tensor, Tensor, Tensor]:
        """What planning reads: ``qo_indptr``, ``kv_indptr``, lengths; on the CPU, without a copy."""
        packed, split = torch.from_numpy(self.packed), self.rows + 1
        return packed[:split], packed[split : 2 * split], torch.from_numpy(self.kv_lengths)

    def read_by_plan(self, kind: str) -> npt.NDArray[np.int32]:
        """All that planning a kernel of *kind* reads, in one array: the decoding kernel divides whole pages, however
        full the last one is, and is told nothing but where each row's begin."""
        split = self.rows + 1
        if kind == "decode":
            return self.packed[split : 2 * split]
        return np.concatenate((self.packed[: 2 * split], self.kv_lengths))


def split_packed(packed: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``qo_indptr``, ``kv_indptr``, ``indices`` and ``last_page_len`` of *packed*, which is on the device."""
    head = 3 * rows + 2
    return packed[: rows + 1], packed[rows + 1 : 2 * rows + 2], packed[head:], packed[2 * rows + 2 : head]


def kernel_page(page_size: int) -> int:
    """Tokens per page as the kernels see them: *page_size* or the largest part of it that is not too large."""
    return next(part for part in range(min(page_size, _LARGEST_PAGE), 0, -1) if page_size % part == 0)


def room(rows: int, most_pages: int, page_size: int) -> int:
    """Entries that ``packed`` can have for *rows* rows of up to *most_pages* pages of *page_size*."""
    return 3 * rows + 2 + rows * most_pages * (page_size // kernel_page(page_size))


def list_pages(lengths: _Ints, kv_lengths: _Ints, tables: npt.NDArray[np.int32], page_size: int) -> PageList:
    """Of rows with *lengths* queries over the first *kv_lengths* tokens of their *tables* ``[rows, pages]``."""
    rows, page = len(lengths), kernel_page(page_size)
    parts = page_size // page
    if parts > 1:
        within = np.arange(parts, dtype=np.int32)
        tables = np.add(tables[:, :, None] * np.int32(parts), within, dtype=np.int32).reshape(rows, -1)
    counts = (kv_lengths + (page - 1)) // page
    head = 3 * rows + 2
    packed = np.empty(head + int(counts.sum()), np.int32)
    packed[0] = packed[rows + 1] = 0
    np.cumsum(lengths, dtype=np.int32, out=packed[1 : rows + 1])
    np.cumsum(counts, dtype=np.int32, out=packed[rows + 2 : 2 * rows + 2])
    packed[2 * rows + 2 : head] = kv_lengths - np.maximum(counts - 1, 0) * page  # 0 of an empty context
    packed[head:] = tables[np.arange(tables.shape[1]) < counts[:, None]]
    return PageList(rows, int(packed[rows]), packed, kv_lengths.astype(np.int32))


def leading_ones(lengths: _Ints) -> int:
    """How many rows, from the first on, have one query."""
    other = np.flatnonzero(lengths != 1)
    return int(other[0]) if other.size else len(lengths)
