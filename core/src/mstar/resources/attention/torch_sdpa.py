"""Attention with torch's ``scaled_dot_product_attention``, on the CPU and on CUDA.

Decoding reads a whole context for one query, so memory traffic decides. Rows with similar context lengths are gathered
together into a small reused buffer that stays in the processor's cache, and attended to in one padded call; a row that
is alone and whose pages form a run is read in place. Query heads that share a key head become queries of that head, so
keys and values are never repeated. What is gathered from where, and the masks, are made once a step and used by all
layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.resources.attention.base import AttentionBackend, AttentionNeed, KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.layout import Group, Layout, build_layout
from mstar.resources.attention.memory import KVMemory
from mstar.resources.staging import Stage

__all__ = ["TorchAttention"]

_CPU_SCRATCH_BYTES = 1 << 21
"""What one gather should stay below on the CPU: about a core's second-level cache. Measured best of 1, 2 and 4 MiB."""
_GPU_SCRATCH_BYTES = 1 << 28
"""On a GPU fewer, larger calls win; this bounds the scratch memory."""


class TorchAttention(AttentionBackend):
    """Works for every device, dtype, head size and mask."""

    name = "torch_sdpa"
    priority = 0

    def __init__(self) -> None:
        if torch.cuda.is_available():
            # cuDNN's attention is compiled anew for every length of keys: 40 ms a step while contexts grow.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._scratch: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def batch_invariant(self, need: AttentionNeed) -> bool:
        """Where it is exact to the token: see promise P6."""
        return need.device.type == "cpu" and need.dtype is torch.float32

    def supports(self, need: AttentionNeed) -> str | None:
        if need.query_heads % need.kv_heads:
            return f"{need.query_heads} query heads are not a multiple of {need.kv_heads} key heads"
        return None

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        return _TorchKVPlan(self, memory, batch)

    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        return _TorchRaggedPlan(lengths)

    def scratch(self, memory: KVMemory, lines: int) -> Tensor:
        """A buffer ``[lines, kv_heads * head_dim]`` for one gather; its contents last until the next call."""
        width = memory.kv_heads * memory.head_dim
        key = (memory.data.device, memory.dtype, width)
        buffer = self._scratch.get(key)
        if buffer is None or buffer.shape[0] < lines:
            with torch.inference_mode(False):  # usable in and outside of inference mode, whoever comes first
                buffer = torch.empty(lines, width, dtype=memory.dtype, device=memory.data.device)
            self._scratch[key] = buffer
        return buffer


class _TorchKVPlan(KVPlan):
    """Layouts are made at first use: most models use one of (window, causal) per step."""

    def __init__(self, backend: TorchAttention, memory: KVMemory, batch: KVBatch):
        self.backend, self.memory, self.batch = backend, memory, batch
        self._layouts: dict[tuple[int | None, bool, torch.dtype], Layout] = {}

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
        layout = self._layout(window, causal, q.dtype)
        scratch = self.backend.scratch(self.memory, layout.scratch)
        if layout.order is not None:
            q = q.index_select(0, layout.order)
            k = None if k is None else k.index_select(0, layout.order)
            v = None if v is None else v.index_select(0, layout.order)
        parts = []
        for group in layout.groups:
            keys, values = self._keys_values(layer, group, k, v, scratch, q.dtype)
            parts.append(_group_attention(q[group.begin : group.end], keys, values, group, scale, softcap))
        if not parts:
            return torch.empty_like(q)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if layout.inverse is None else out.index_select(0, layout.inverse)

    def _layout(self, window: int | None, causal: bool, dtype: torch.dtype) -> Layout:
        key = (window, causal, dtype)
        layout = self._layouts.get(key)
        if layout is None:
            memory = self.memory
            device = memory.data.device
            budget_bytes = _CPU_SCRATCH_BYTES if device.type == "cpu" else _GPU_SCRATCH_BYTES
            budget = budget_bytes // KVMemory.token_bytes(1, memory.kv_heads, memory.head_dim, memory.dtype)
            layout = build_layout(self.batch, memory.tokens, budget, window, causal, dtype, device)
            self._layouts[key] = layout
        return layout

    def _keys_values(
        self, layer: int, group: Group, k: Tensor | None, v: Tensor | None, scratch: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, keys, kv_heads, head_dim]`` of *group*."""
        memory, rows = self.memory, group.rows
        shape = (rows, -1, memory.kv_heads, memory.head_dim)
        if group.context:
            if group.pairs is None:
                assert group.run is not None
                keys, values = memory.run(layer, group.run, group.context)
            else:
                lines = scratch[: group.pairs.shape[0]]
                torch.index_select(memory.pairs[layer], 0, group.pairs, out=lines)
                keys, values = lines.chunk(2)
            keys, values = keys.view(shape).to(dtype), values.view(shape).to(dtype)
            if not group.beside:
                return keys, values
        assert k is not None
        assert v is not None
        own_k, own_v = k[group.begin : group.end].view(shape), v[group.begin : group.end].view(shape)
        if not group.context:
            return own_k, own_v
        return torch.cat((keys, own_k), 1), torch.cat((values, own_v), 1)


def _group_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float | None, softcap: float | None
) -> Tensor:
    """``[rows * queries, query_heads, head_dim]`` from packed *q* and k, v ``[rows, keys, kv_heads, head_dim]``."""
    rows, queries, mask = group.rows, group.queries, group.mask
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    shared = heads // kv_heads
    if queries == 1:
        out = _sdpa(
            q.view(rows, kv_heads, shared, dim), k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, softcap
        )
        return out.reshape(rows, heads, dim)
    if rows == 1:
        # Key heads become the batch, and the query heads that share one see it through a stride of 0.
        grouped = q.view(queries, kv_heads, shared, dim).permute(1, 2, 0, 3)
        k = k[0].transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
        v = v[0].transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)
        out = _sdpa(grouped, k, v, mask, group.square, scale, softcap)
        return out.permute(2, 0, 1, 3).reshape(queries, heads, dim)
    grouped = q.view(rows, queries, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    if mask is not None:
        mask = mask.expand(-1, shared, queries, -1).reshape(rows, 1, shared * queries, -1)
    out = _sdpa(grouped, k.transpose(1, 2), v.transpose(1, 2), mask, False, scale, softcap)
    return out.view(rows, kv_heads, shared, queries, dim).permute(0, 3, 1, 2, 4).reshape(rows * queries, heads, dim)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, square: bool, scale: float | None, softcap: float | None
) -> Tensor:
    """One call over ``[batch, heads, length, head_dim]``. *square*: causal over equally many queries and keys."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, square, scale=scale)
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    logits = torch.tanh((q @ k.transpose(-1, -2)).float() * (factor / softcap)) * softcap
    if square:
        below = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        logits = logits.masked_fill(~below, float("-inf"))
    elif mask is not None:
        logits = logits + mask
    return torch.softmax(logits, -1).to(q.dtype) @ v


class _TorchRaggedPlan(RaggedPlan):
    """Segments of equal length run as one batch; they are brought together first if they are not neighbours."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = np.asarray(lengths, np.int64)
        order = np.argsort(self.lengths, kind="stable")
        self._order: Tensor | None = None
        self._inverse: Tensor | None = None
        runs = 1 + np.count_nonzero(np.diff(self.lengths))
        if np.unique(self.lengths).size < runs and self.lengths.size:
            offsets = np.concatenate(([0], np.cumsum(self.lengths)))
            packed = np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in order])
            self._order, self._inverse = torch.from_numpy(packed), torch.from_numpy(np.argsort(packed))
        else:
            order = np.arange(len(order))
        sizes = self.lengths[order]
        equal = np.split(sizes, np.flatnonzero(np.diff(sizes)) + 1) if sizes.size else []
        self._runs = [(int(run.size), int(run[0])) for run in equal if run[0]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
        if self._order is not None:
            order = self._order = self._order.to(q.device)
            q, k, v = q.index_select(0, order), k.index_select(0, order), v.index_select(0, order)
        parts, begin = [], 0
        for count, length in self._runs:
            end = begin + count * length
            parts.append(_segments(q[begin:end], k[begin:end], v[begin:end], count, causal, scale))
            begin = end
        if not parts:
            return torch.empty_like(q)
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._inverse is None:
            return out
        self._inverse = self._inverse.to(q.device)
        return out.index_select(0, self._inverse)


def _segments(q: Tensor, k: Tensor, v: Tensor, count: int, causal: bool, scale: float | None) -> Tensor:
    """Attention within *count* segments of equal length."""
    length, heads, dim, kv_heads = q.shape[0] // count, q.shape[1], q.shape[2], k.shape[1]
    ks, vs = k.view(count, length, kv_heads, dim), v.view(count, length, kv_heads, dim)
    if heads == kv_heads:
        qs = q.view(count, length, heads, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(qs, ks.transpose(1, 2), vs.transpose(1, 2), None, 0.0, causal, scale=scale)
        return out.transpose(1, 2).reshape(count * length, heads, dim)
    group = Group(0, length, count, length, 0, None, None, True, None, False)
    if not causal:
        return _group_attention(q, ks, vs, group, scale, None)
    group.rows, group.square = 1, length > 1
    parts = []
    for i in range(count):
        own = q[i * length : (i + 1) * length]
        parts.append(_group_attention(own, ks[i : i + 1], vs[i : i + 1], group, scale, None))
    return torch.cat(parts)
