"""Attention with FlashInfer (https://docs.flashinfer.ai, Ye et al. 2025, arXiv:2501.01005) on CUDA.

Rows with one query, which come first in a step, are served by a decoding kernel, the others by a prefill kernel. What
FlashInfer's masks cannot express (sinks outside of a window; a window over keys beside the memory) is left to
:class:`~mstar.resources.attention.TorchAttention`.

Steps of few rows with one query each go to a kernel of our own where the caller leaves norm and rotation to it:
:mod:`mstar.resources.attention.triton_decode`.

On a lane the kernels of all ways of attending that the lane has seen are planned again for each step, before the graph
that holds them is replayed. What a graph reads lies in tensors of the stage and in workspaces of the lane's kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.resources.attention.base import AttentionBackend, AttentionNeed, KVBatch, KVPlan, RaggedPlan
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, Library, Shape
from mstar.resources.attention.flashinfer_lanes import LaneBeside, LaneSegments, Windows
from mstar.resources.attention.flashinfer_plans import BesidePlan, LanePlan, SegmentsPlan, StepPlan
from mstar.resources.attention.memory import KVMemory
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.attention.triton_decode import FewRows
from mstar.resources.staging import Stage

__all__ = ["FlashInferAttention"]

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_CAPABILITY = (8, 0)

_Pair = tuple[Tensor, Tensor]


class FlashInferAttention(AttentionBackend):
    """bfloat16 and float16 on CUDA from compute capability 8.0 on; head sizes 64, 128 and 256."""

    name = "flashinfer"
    priority = 20
    capturable = True
    capturable_chunks = True
    capturable_beside = True

    def __init__(self) -> None:
        self._torch = TorchAttention()
        self.few = FewRows()
        self._libraries: dict[torch.device, Library] = {}
        self._kernels: dict[tuple[str, Shape, Combination], Kernel] = {}
        self._windows: dict[tuple[int, int], Windows] = {}
        self._pages: weakref.WeakKeyDictionary[KVMemory, dict[int, list[_Pair]]] = weakref.WeakKeyDictionary()
        self._checked: dict[AttentionNeed, str | None] = {}

    def supports(self, need: AttentionNeed) -> str | None:
        """``None``, or why not. The first time a need is asked for that it should serve, it tries: that loads the
        kernels, which takes minutes where they must be compiled."""
        reason = self._refuses(need) or self._torch.supports(need)
        if reason is not None:
            return reason
        if need not in self._checked:
            self._checked[need] = self._fault(need)
        return self._checked[need]

    def _refuses(self, need: AttentionNeed) -> str | None:
        if need.device.type != "cuda":
            return "it runs on CUDA only"
        kept = need.dtype if need.kv_dtype is None else need.kv_dtype
        if need.dtype not in _DTYPES:
            return f"it has no kernels for {need.dtype}, only for bfloat16 and float16"
        if kept is not need.dtype:
            return f"it reads keys in the dtype of the queries, {need.dtype}, not in {kept}"
        if need.head_dim not in _HEAD_DIMS:
            return f"it has no kernels for head_dim {need.head_dim}, only for 64, 128 and 256"
        found = torch.cuda.get_device_capability(need.device)
        if found < _CAPABILITY:
            return "it needs a GPU of compute capability 8.0 or newer, not {}.{}".format(*found)
        return None

    def _fault(self, need: AttentionNeed) -> str | None:
        from mstar.resources.attention.flashinfer_check import first_step

        try:
            self.library(need.device)
            return first_step(self, need)
        except ModuleNotFoundError as error:
            if error.name != "flashinfer":
                return f"it cannot be imported: {error}"
            return "it is not installed; pip install 'mstar-core[cuda]'"
        except Exception as error:  # a broken installation, compiler or driver raises what it likes
            lines = str(error).strip().splitlines() or [""]
            return f"a first step with it failed: {type(error).__name__}: {lines[0]}"

    def plan_kv(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        if batch.step_kv == "beside":
            if stage.lane is None:
                return BesidePlan(self, memory, batch, stage, key)
            beside: LaneBeside = stage.keep(f"{key}.flashinfer", lambda: LaneBeside(self, memory, key))
            beside.refill(batch, stage)
            return beside
        if stage.lane is None:
            return StepPlan(self, memory, batch, stage, key)
        plan: LanePlan = stage.keep(f"{key}.flashinfer", lambda: LanePlan(self, memory, key))
        plan.refill(batch, stage)
        return plan

    def plan_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        if stage.lane is None:
            return SegmentsPlan(self, lengths, stage, key)
        plan: LaneSegments = stage.keep(f"{key}.flashinfer", lambda: LaneSegments(self, key))
        plan.refill(np.asarray(lengths, np.int64), stage)
        return plan

    def plan_windows(self, windows: int, length: int) -> RaggedPlan:
        return self._windows.setdefault((windows, length), Windows(self, windows, length))

    # --- what plans share -------------------------------------------------------------------------------------------
    def torch_plan(self, memory: KVMemory, batch: KVBatch, stage: Stage, key: str) -> KVPlan:
        return self._torch.plan_kv(memory, batch, stage, key)

    def torch_ragged(self, lengths: Sequence[int], stage: Stage, key: str) -> RaggedPlan:
        return self._torch.plan_ragged(lengths, stage, key)

    def library(self, device: torch.device) -> Library:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._libraries:
            self._libraries[device] = Library(device)
        return self._libraries[device]

    def kernel(self, device: torch.device, kind: str, shape: Shape, how: Combination) -> Kernel:
        """The kernel that steps outside of lanes use, one after the other."""
        key = (kind, shape, how)
        if key not in self._kernels:
            self._kernels[key] = Kernel(self.library(device), kind, shape, how)
        return self._kernels[key]

    def pages(self, memory: KVMemory, page: int) -> list[_Pair]:
        """Per layer views ``[pages, page, kv_heads, head_dim]`` of keys and values."""
        views = self._pages.setdefault(memory, {})
        if page not in views:
            shape = (-1, page, memory.kv_heads, memory.head_dim)
            views[page] = [(layer[0].view(shape), layer[1].view(shape)) for layer in memory.data.unbind(0)]
        return views[page]
