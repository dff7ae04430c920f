"""Attention on the CPU with kernels of our own for decoding: pages are read where they lie, nothing is gathered.

Rows of one query run in the kernels of :mod:`mstar.resources.attention.cpu_kernels`; prompts, and what the kernels do
not know (soft caps, sinks, keys beside the memory), are left to :class:`~mstar.resources.attention.TorchAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mstar.nn.ops import cpu_kernels_fault
from mstar.resources.attention.base import AttentionBackend, AttentionNeed, KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.staging import Stage

if TYPE_CHECKING:
    from mstar.nn.ops.jit import Kernel

__all__ = ["NumbaAttention"]

_DTYPES = (torch.float32, torch.bfloat16)
_SHARED = 1 << 15
"""Elements of keys from which on several threads are worth waking."""


class NumbaAttention(AttentionBackend):
    """float32 and bfloat16 on the CPU; any head size, page size and window."""

    name = "numba_cpu"
    priority = 10

    def __init__(self) -> None:
        self._torch = TorchAttention()

    def batch_invariant(self, need: AttentionNeed) -> bool:
        """Where it is exact to the token: see promise P6."""
        return need.device.type == "cpu" and need.dtype is torch.float32

    def supports(self, need: AttentionNeed) -> str | None:
        if need.device.type != "cpu":
            return "it runs on the CPU only"
        if need.mode != "kv":
            return "it has no kernel for attention within a step"
        if need.dtype not in _DTYPES:
            return f"it has no kernel for {need.dtype}"
        fault = self._torch.supports(need) or cpu_kernels_fault()
        if fault is None:
            import mstar.resources.attention.cpu_kernels  # noqa: F401  # compiles them now, not in the first step
        return fault

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        plain = batch.step_kv != "beside" and batch.sink == 0 and batch.gaps is None and memory.dtype in _DTYPES
        decodes = _leading_ones(batch.lengths) if plain else 0
        if not decodes:
            return self._torch.plan_kv(memory, batch, stage, key)
        return _NumbaKVPlan(self._torch, memory, batch, decodes, stage, key)

    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        return self._torch.plan_ragged(lengths, stage, key)


def _leading_ones(lengths: np.ndarray) -> int:
    other = np.flatnonzero(lengths != 1)
    return int(other[0]) if other.size else len(lengths)


class _NumbaKVPlan(KVPlan):
    """The first *decodes* rows have one query each; the others are the torch backend's."""

    def __init__(self, backend: TorchAttention, memory: KVMemory, batch: KVBatch, decodes: int, stage: Stage, key: str):
        from mstar.nn.ops.jit import float_bits
        from mstar.resources.attention.cpu_kernels import decode_kernels

        self._backend, self._memory, self._batch, self._decodes = backend, memory, batch, decodes
        self._kernel: Kernel = decode_kernels[_DTYPES.index(memory.dtype)]
        self._bits = float_bits
        self._tables = np.ascontiguousarray(batch.tables[:decodes], np.int32)
        self._ends = batch.starts[:decodes] + (batch.step_kv == "written")
        self._lows: dict[int | None, np.ndarray] = {}
        width = memory.kv_heads * memory.head_dim
        threads = torch.get_num_threads()
        self._parallel = threads > 1 and int(self._ends.sum()) * width >= _SHARED
        # With rows enough for all threads, one work item is a row, whose keys are read in one stream.
        self._heads = memory.kv_heads if decodes >= 2 * threads or not self._parallel else 1
        self._whole: KVPlan | None = None
        self._stage, self._key = stage, key
        rest = decodes < len(batch.lengths)
        self._rest = backend.plan_kv(memory, _without(batch, decodes), stage, key) if rest else None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None or q.dtype is not self._memory.dtype or q.stride()[1:] != (q.shape[2], 1):
            if self._whole is None:
                self._whole = self._backend.plan_kv(self._memory, self._batch, self._stage, self._key)
            return self._whole.attend(layer, q, k, v, window=window, causal=causal, scale=scale, softcap=softcap)
        out = q.new_empty(q.shape)
        self._decode(layer, q, out, window, q.shape[2] ** -0.5 if scale is None else scale)
        if self._rest is not None:
            n = self._decodes
            own = (None, None) if k is None or v is None else (k[n:], v[n:])
            out[n:] = self._rest.attend(layer, q[n:], *own, window=window, causal=causal, scale=scale)
        return out

    def _decode(self, layer: int, q: Tensor, out: Tensor, window: int | None, scale: float) -> None:
        memory, lows = self._memory, self._lows.get(window)
        if lows is None:
            zeros = np.zeros_like(self._ends)
            lows = self._lows[window] = zeros if window is None else np.maximum(zeros, self._ends - window)
        keys = memory.keys_at(layer)
        self._kernel(
            self._parallel,
            q.data_ptr(),
            out.data_ptr(),
            keys,
            keys + memory.values_offset,
            self._tables.ctypes.data,
            lows.ctypes.data,
            self._ends.ctypes.data,
            self._decodes,
            q.stride(0),
            memory.tokens,
            memory.kv_heads,
            q.shape[1] // memory.kv_heads,
            memory.head_dim,
            self._batch.page_size,
            self._tables.shape[1],
            self._bits(scale),
            self._heads,
        )


def _without(batch: KVBatch, rows: int) -> KVBatch:
    """*batch* without its first *rows* rows."""
    return KVBatch(batch.lengths[rows:], batch.starts[rows:], batch.tables[rows:], batch.page_size, batch.step_kv)
