"""Steps of few rows with one query each: everything between two matrix products in one kernel a layer.

There FlashInfer's kernels wait more than they read: at one row over 1,024 tokens a layer's takes ten times as long as
the keys and values take at copy bandwidth, and the kernel before it, which rotates and stores, has a launch of its own.
So the plans of FlashInfer hand such steps to :mod:`mstar.nn.ops.cuda_attention`, with the page lists that are on the
device for FlashInfer anyway. Nothing more is planned on the host for them.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from mstar.nn import ops
from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotation
from mstar.resources.attention.base import KVBatch
from mstar.resources.attention.memory import KVMemory

__all__ = ["ROWS", "WIDE_ROWS", "FewRows", "RowsPlan"]

ROWS, WIDE_ROWS = 32, 128
"""Most rows of a step that it serves, those that pad a captured step included; 0: none. The second is for heads of 256.
Measured on an H200 (``benchmarks/gpu_decode_attention.py``): with heads of 128 it is 1.12 times as fast as FlashInfer
and ``rotate_store`` with 32 rows, 0.9 times with 64; with 4 key heads of 256 and contexts of 1,024 1.09 times with 32
rows, 1.10 with 64, 1.06 with 128."""
_WIDE = 256
_DIVIDED = 4
"""Programs among which a long context of such heads is divided at least: with many rows each would have one."""


def _kernels(device: torch.device) -> ModuleType | None:
    if device.type != "cuda" or ops.cuda_kernels_fault() is not None:
        return None
    from mstar.nn.ops import cuda_attention

    return cuda_attention


def _served(memory: KVMemory) -> int:
    """Most rows of a step over *memory* that it serves."""
    return WIDE_ROWS if memory.head_dim == _WIDE else ROWS


class FewRows:
    """One for each backend that hands steps on."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, int, int], object] = {}

    def plan(
        self, memory: KVMemory, batch: KVBatch, page: int, tables: tuple[Tensor, Tensor, Tensor]
    ) -> RowsPlan | None:
        """``None`` if the step is not for it.

        :param tables: on the device, as ``decode_heads`` takes them. :param page: tokens of a page in them.
        """
        rows, device, served = len(batch.lengths), memory.data.device, _served(memory)
        if not 0 < rows <= served or batch.step_kv != "written" or (batch.lengths != 1).any():
            return None
        kernels = _kernels(device)
        if kernels is None or not kernels.takes(memory.dtype, memory.head_dim):
            return None
        key = (device, memory.kv_heads, memory.head_dim)
        if key not in self._scratch:
            each = [self._splits(kernels, count, memory)[0] * count for count in range(1, served + 1)]
            most = max(each) * memory.kv_heads
            self._scratch[key] = kernels.Scratch(most, memory.head_dim, device)
        return RowsPlan(kernels, memory, page, tables, self._scratch[key], self._splits(kernels, rows, memory), batch)

    def _splits(self, kernels: ModuleType, rows: int, memory: KVMemory) -> tuple[int, int]:
        """Among how many programs a row's long context is divided, and a usual one."""
        usual: int = kernels.splits_for(rows, memory.kv_heads, memory.data.device)
        return max(usual, _DIVIDED) if memory.head_dim == _WIDE else usual, usual


class RowsPlan:
    """A step of one query a row. It reads nothing but *tables*, so that of a lane serves all of the lane's steps."""

    def __init__(
        self,
        kernels: ModuleType,
        memory: KVMemory,
        page: int,
        tables: tuple[Tensor, Tensor, Tensor],
        scratch: object,
        splits: tuple[int, int],
        batch: KVBatch,
    ):
        self._kernels, self._memory, self._page, self._tables = kernels, memory, page, tables
        self._scratch, self._rows, self._sinks = scratch, len(batch.lengths), batch.sink > 0
        self._splits, self._usual = splits

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        q_heads: int,
        rotation: Rotation,
        norms: HeadNorms | None,
        places: Tensor,
        window: int | None,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor | None:
        """See :meth:`mstar.resources.attention.KVPlan.attend_heads`."""
        if window is not None and self._sinks:
            return None
        if heads.shape[0] != self._rows:
            raise ValueError(f"{heads.shape[0]} queries in a step that was planned for {self._rows}")
        mixed: Tensor | None = self._kernels.decode_heads(
            heads,
            q_heads,
            rotation.cos,
            rotation.sin,
            norms,
            *self._memory.keys_values(layer),
            places,
            self._tables,
            self._page,
            self._scratch,
            self._splits,
            usual=self._usual,
            window=window,
            scale=scale,
            softcap=softcap,
        )
        return mixed
