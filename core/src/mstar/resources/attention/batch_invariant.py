"""Attention of ``engine.deterministic`` on CUDA: a row's results do not depend on the rest of its step.

One kernel of our own for decoding, prompts and chunks (:mod:`mstar.nn.ops.cuda_invariant`). FlashInfer's results depend
on the step: it divides contexts by how many rows there are, and chooses its tiles, within which warps share the keys,
by the mean number of queries of all rows. Its fixed split size settles the first only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.nn import ops
from mstar.resources.attention.base import AttentionBackend, AttentionNeed, KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.flashinfer_pages import kernel_page, list_pages, room, split_packed
from mstar.resources.attention.memory import KVMemory
from mstar.resources.staging import Stage

__all__ = ["BatchInvariantAttention", "tile_table"]

_FILLED = 1.8
"""Programs for each multiprocessor that a launch is divided into at least, if contexts are long enough."""
_MOST_PARTS = 16
_SCRATCH_BYTES = 1 << 27
"""Most memory for what programs leave each other. A step that would need more has a program for each whole context."""


def _kernels() -> ModuleType:
    from mstar.nn.ops import cuda_invariant

    return cuda_invariant


def tile_table(
    lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], per: int
) -> npt.NDArray[np.int32]:
    """int32 ``[tiles, 5]``: the queries of rows of *lengths* behind *starts* tokens of context, *per* of them to a
    tile, in the fields that :data:`mstar.nn.ops.cuda_invariant.FIELDS` names.

    :param pages: ``[rows + 1]``: where each row's pages begin.
    """
    counts = -(-lengths // per)
    row = np.repeat(np.arange(len(lengths)), counts)
    within = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * per
    table = np.empty((len(row), 5), np.int32)
    table[:, 0] = (np.cumsum(lengths) - lengths)[row] + within
    table[:, 1] = np.minimum(lengths[row] - within, per)
    table[:, 2] = pages[row]
    table[:, 3] = starts[row] + within
    table[:, 4] = (starts + lengths)[row]
    return table


class BatchInvariantAttention(AttentionBackend):
    """bfloat16 and float16 on CUDA, for engines that are to be deterministic; head sizes 64, 128 and 256."""

    name = "batch_invariant"
    priority = -10
    capturable = True
    capturable_chunks = True

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def batch_invariant(self, need: AttentionNeed) -> bool:
        return True

    def supports(self, need: AttentionNeed) -> str | None:
        if not need.deterministic:
            return "it is for engine.deterministic, others are faster"
        if need.device.type != "cuda":
            return "it runs on CUDA only"
        if need.mode != "kv":
            return "it attends to keys that are kept, not within a step"
        if need.kv_dtype not in (None, need.dtype):
            return f"it reads keys in the dtype of the queries, {need.dtype}, not in {need.kv_dtype}"
        if need.query_heads % need.kv_heads:
            return f"{need.query_heads} query heads are not a multiple of {need.kv_heads} key heads"
        fault = ops.cuda_kernels_fault()
        if fault is not None:
            return fault
        reason: str | None = _kernels().takes(need.dtype, need.head_dim, need.query_heads // need.kv_heads)
        return reason

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        if batch.step_kv != "written" or batch.sink or batch.gaps is not None:
            raise ValueError(f"{key!r}: a deterministic step keeps its keys, and contexts are without gaps")
        plan: _Plan = stage.keep(f"{key}.batch_invariant", lambda: _Plan(self, memory, key))
        plan.refill(batch, stage)
        return plan

    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        raise NotImplementedError("this backend supports no attention within a step")

    def room(self, device: torch.device, shares: int, sums: int, counters: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors of at least these sizes: float32, float32, zeros int32. Whoever has older ones keeps those."""
        sizes = (shares, sums, counters)
        found = self._scratch.get(device)
        if found is None or any(old.numel() < size for old, size in zip(found, sizes, strict=True)):
            with torch.inference_mode(False):  # usable in and outside of inference mode, whoever comes first
                found = (
                    torch.empty(shares, dtype=torch.float32, device=device),
                    torch.empty(sums, dtype=torch.float32, device=device),
                    torch.zeros(counters, dtype=torch.int32, device=device),
                )
            self._scratch[device] = found
        return found


class _Plan(KVPlan):
    """One step, or the steps of one lane."""

    def __init__(self, backend: BatchInvariantAttention, memory: KVMemory, key: str):
        self._backend, self._memory, self._key = backend, memory, key
        self._scratch: object = None

    def refill(self, batch: KVBatch, stage: Stage) -> None:
        """Plan a step. What it reads is on the device once *stage* has been sent."""
        size, rows, lane, kernels = batch.page_size, len(batch.lengths), stage.lane, _kernels()
        widest = batch.most_pages or batch.tables.shape[1]
        self._page, self._heads, self._queries = kernel_page(size), batch.query_heads, int(batch.lengths.sum())
        pages = list_pages(batch.lengths, batch.starts + batch.lengths, batch.tables, size)
        packed = stage.put(f"{self._key}.pages", pages.packed, room=None if lane is None else room(rows, widest, size))
        self._indices = split_packed(packed, rows)[2]
        group = batch.query_heads // self._memory.kv_heads
        per = kernels.LINES // group
        table = tile_table(batch.lengths, batch.starts, pages.packed[rows + 1 : 2 * rows + 2], per)
        if lane is None:
            longest, single = int((batch.starts + batch.lengths).max(initial=1)), batch.lengths.max(initial=1) == 1
        else:
            longest, single = widest * size, lane.tokens == lane.rows
            tiles = (
                lane.rows if single else lane.tokens // per + lane.rows
            )  # of each row, the last may be a part of one
            table = np.concatenate((table, np.zeros((tiles - len(table), kernels.FIELDS), np.int32)))
        self._tiles = stage.put(f"{self._key}.tiles", table)
        if self._scratch is None:
            self._scratch = self._room(kernels, len(table), longest, group if single else kernels.LINES)

    def _room(self, kernels: ModuleType, tiles: int, longest: int, lines: int) -> object:
        """How many programs share a context of up to *longest* tokens, and where they leave *lines* lines each."""
        memory, device = self._memory, self._memory.data.device
        pieces, cells = -(-longest // kernels.PIECE), tiles * memory.kv_heads
        kept = cells * pieces * lines
        parts, wanted = 1, _FILLED * _processors(device)
        while parts < min(_MOST_PARTS, pieces) and cells * parts < wanted:
            parts *= 2
        if parts == 1 or kept * memory.head_dim * 4 > _SCRATCH_BYTES:
            return kernels.Scratch(*self._backend.room(device, 1, 1, 1))
        return kernels.Scratch(
            *self._backend.room(device, kept * memory.head_dim, 2 * kept, cells), parts, pieces, lines
        )

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
        if q.shape[0] != self._queries:
            raise ValueError(f"{q.shape[0]} queries in a step that was planned for {self._queries}")
        if window is not None and not causal:
            raise ValueError(f"{self._key!r}: a deterministic step has no kernel for windows without causal order")
        if q.shape[1] != self._heads:
            raise ValueError(f"{self._key!r}: {q.shape[1]} query heads, but {self._heads} are declared")
        memory = self._memory
        mixed: Tensor = _kernels().attend(
            q, *memory.keys_values(layer), self._tiles, self._indices, self._page, memory.kv_heads, self._scratch,
            window=window, causal=causal, scale=scale, softcap=softcap,
        )  # fmt: skip
        return mixed


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
