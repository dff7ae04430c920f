"""A stand-in for FlashInfer 0.6 where there is no GPU.

Its functions take what the real ones take, by position, and are stricter about types. They compute in float32 from
nothing but their arguments: which keys a row sees follows from the tables on the "device", the schedule from the plan
in the workspace, and both must agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

_EMPTY_LSE = -5e4
"""What FlashInfer's kernels use for the logarithm of 0."""


@dataclass
class Fake:
    """What was asked for. *broken*: names of kernels that cannot be loaded; *jitter*: plans differ from each other."""

    hopper: bool = True
    runs: list[tuple[str, int, float, bool]] = field(default_factory=list)
    plans: list[tuple[str, bool]] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    jitter: bool = False
    error: float = 0.0

    def load(self, kind: str) -> None:
        if kind in self.broken:
            raise RuntimeError(f"ninja: build of {kind} stopped\nand much more")


def install(monkeypatch: pytest.MonkeyPatch, hopper: bool = True) -> Fake:
    fake = Fake(hopper)
    modules = {name: ModuleType(f"flashinfer.{name}") for name in ("prefill", "decode", "cascade", "utils")}

    def get_batch_prefill_module(backend: str, *args: Any) -> _Prefill:
        fake.load(backend)
        return _Prefill(fake, backend, *args)

    def get_batch_decode_module(*args: Any) -> _Decode:
        fake.load("decode")
        return _Decode(fake, *args)

    modules["prefill"].get_batch_prefill_module = get_batch_prefill_module
    modules["decode"].get_batch_decode_module = get_batch_decode_module
    modules["cascade"].merge_state = merge_state
    modules["utils"].device_support_pdl = lambda device: fake.hopper
    modules["utils"].is_sm90a_supported = lambda device: fake.hopper
    package = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, module in modules.items():
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)
    return fake


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    assert s_a.dtype == s_b.dtype == torch.float32
    assert v_a.shape == v_b.shape
    lse = torch.logaddexp2(s_a, s_b)
    merged = v_a * torch.exp2(s_a - lse)[..., None] + v_b * torch.exp2(s_b - lse)[..., None]
    return merged.to(v_a.dtype), lse


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float, cap: float) -> Any:
    """Output ``[n, heads, dim]`` and logarithm to base 2 ``[n, heads]`` of one row."""
    n, length, shared = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if not length:
        return torch.zeros_like(q, dtype=torch.float32), torch.full(q.shape[:2], _EMPTY_LSE)
    k, v = k.float().repeat_interleave(shared, 1), v.float().repeat_interleave(shared, 1)
    logits = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    asked, keys = torch.arange(n)[:, None], torch.arange(length)[None]
    seen = torch.ones(n, length, dtype=torch.bool)
    if causal:
        seen &= keys + n <= length + asked
    if window >= 0:
        seen &= keys + n + window >= length + asked
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("hnl,lhd->nhd", torch.softmax(logits, -1), v)
    return out, lse.T * 1.4426950408889634


def _host(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def _of_type(kind: type, *values: Any) -> None:
    assert all(type(value) is kind for value in values), values


class _Module:
    def __init__(self, fake: Fake, kind: str, options: tuple[Any, ...]):
        q, kv, o, idx, dim_qk, dim_vo, positions, windowed, capped = options
        assert q == kv == o
        assert idx == torch.int32
        assert dim_qk == dim_vo
        assert positions == 0
        _of_type(bool, windowed, capped)
        self.fake, self.kind, self.dtype, self.dim = fake, kind, q, dim_qk
        self.windowed, self.capped = windowed, capped

    def _keep(self, ints: Tensor, pinned: Tensor, *arrays: Tensor) -> None:
        """Leave the plan in the workspace, as the kernel finds it there."""
        assert ints.dtype == pinned.dtype == torch.uint8
        assert pinned.shape[0] >= ints.shape[0]
        plan = torch.cat(arrays).view(torch.uint8)
        pinned[: plan.shape[0]] = plan
        ints[: plan.shape[0]] = pinned[: plan.shape[0]]

    def _info(self, graph: bool, rows: int, queries: int) -> list[int]:
        self.fake.plans.append((self.kind, graph))
        return [rows, queries, int(graph), len(self.fake.plans) if self.fake.jitter else 0]

    def _check(self, window: int, cap: float, scale: float, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        _of_type(int, window)
        _of_type(float, cap, scale)
        assert (window != -1) == self.windowed
        assert (cap > 0) == self.capped
        assert q.dtype == out.dtype == self.dtype
        assert q.stride(2) == 1
        assert out.is_contiguous()
        assert out.shape == q.shape
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32

    def _pages(
        self,
        plan: list[int],
        ints: Tensor,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        tables: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor | None,
        options: tuple[Any, ...],
    ) -> None:
        queries, indptr, indices, last = tables
        for table in tables:
            assert table.dtype == torch.int32
        rows, total = plan[0], plan[1]
        page = caches[0].shape[1]
        assert caches[0].shape == caches[1].shape
        assert caches[0].shape[3] == self.dim
        assert indptr.shape[0] == rows + 1
        assert last.shape[0] == rows
        assert q.shape[0] == total == int(queries[-1])
        pages = indptr.diff()
        lengths = torch.where(pages > 0, (pages - 1) * page + last, 0)
        planned = ints[: 4 * (3 * rows + 2)].view(torch.int32)
        assert torch.equal(planned, torch.cat((queries, indptr, lengths.int()))), "planned for another step"
        for row in range(rows):
            begin, end = int(queries[row]), int(queries[row + 1])
            of_row = indices[int(indptr[row]) : int(indptr[row + 1])].long()
            assert last[row] <= page
            k, v = (cache[of_row].flatten(0, 1)[: int(lengths[row])] for cache in caches)
            part, logs = _attention(q[begin:end], k, v, *options)
            out[begin:end] = part.to(out.dtype) + self.fake.error
            if lse is not None:
                lse[begin:end] = logs


class _Prefill(_Module):
    def __init__(self, fake: Fake, backend: str, *options: Any):
        assert backend in ("fa2", "fa3")
        assert fake.hopper or backend == "fa2"
        *most, half = options
        assert half is False
        super().__init__(fake, backend, tuple(most))
        self.plan = self._plan_fa2 if backend == "fa2" else self._plan

    def _plan_fa2(self, *args: Any) -> list[int]:
        *most, fixed_split_size, disable_split_kv, num_colocated_ctas = args
        assert (fixed_split_size, disable_split_kv, num_colocated_ctas) == (-1, False, 0)
        return self._plan(*most)

    def _plan(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        page_locked_int_workspace_buffer: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_len_arr: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
    ) -> list[int]:
        _host(qo_indptr, kv_indptr, kv_len_arr)
        _of_type(int, total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo)
        _of_type(bool, enable_cuda_graph, causal)
        assert len(qo_indptr) == len(kv_indptr) == batch_size + 1
        assert len(kv_len_arr) == batch_size
        assert total_num_rows == int(qo_indptr[-1])
        assert (window_left != -1) == self.windowed
        self._keep(int_workspace_buffer, page_locked_int_workspace_buffer, qo_indptr, kv_indptr, kv_len_arr)
        return self._info(enable_cuda_graph, batch_size, total_num_rows)

    def paged_run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q: Tensor,
        paged_k_cache: Tensor,
        paged_v_cache: Tensor,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        o: Tensor,
        maybe_lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        maybe_custom_mask: None,
        maybe_mask_indptr: None,
        maybe_alibi_slopes: None,
        maybe_prefix_len_ptr: None,
        maybe_token_pos_in_items_ptr: None,
        maybe_max_item_len_ptr: None,
        logits_soft_cap: float,
        sm_scale: float,
        scale_q: None,
        scale_k: None,
        scale_v: None,
        rope_scale: float,
        rope_theta: float,
        token_pos_in_items_len: int,
        workspace_size: int,
    ) -> None:
        unused = (maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr)
        assert all(each is None for each in (*unused, maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr))
        assert scale_q is scale_k is scale_v is None
        assert (layout, rope_scale, rope_theta, token_pos_in_items_len) == (0, 1.0, 1e4, 0)
        assert enable_pdl is self.fake.hopper
        self._check(window_left, logits_soft_cap, sm_scale, q, o, maybe_lse)
        self.fake.runs.append((self.kind, window_left, logits_soft_cap, mask_mode == 1))
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        options = (mask_mode == 1, window_left, sm_scale, logits_soft_cap)
        caches = (paged_k_cache, paged_v_cache)
        self._pages(plan_info_vec, int_workspace_buffer, q, caches, tables, o, maybe_lse, options)

    def ragged_run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        o: Tensor,
        maybe_lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        maybe_custom_mask: None,
        maybe_mask_indptr: None,
        maybe_alibi_slopes: None,
        maybe_prefix_len_ptr: None,
        maybe_token_pos_in_items_ptr: None,
        maybe_max_item_len_ptr: None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_scale: float,
        rope_theta: float,
        token_pos_in_items_len: int,
    ) -> None:
        unused = (maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr)
        assert all(each is None for each in (*unused, maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr))
        assert (layout, rope_scale, rope_theta, token_pos_in_items_len) == (0, 1.0, 1e4, 0)
        assert enable_pdl is self.fake.hopper
        self._check(window_left, logits_soft_cap, sm_scale, q, o, maybe_lse)
        rows = plan_info_vec[0]
        planned = int_workspace_buffer[: 4 * (3 * rows + 2)].view(torch.int32)
        assert torch.equal(planned, torch.cat((qo_indptr, kv_indptr, kv_indptr.diff()))), "planned for another step"
        assert q.shape[0] == k.shape[0] == v.shape[0] == plan_info_vec[1]
        self.fake.runs.append((f"ragged {self.kind}", window_left, logits_soft_cap, mask_mode == 1))
        for row in range(rows):
            span = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            part, logs = _attention(q[span], k[span], v[span], mask_mode == 1, window_left, sm_scale, logits_soft_cap)
            o[span] = part.to(o.dtype) + self.fake.error
            if maybe_lse is not None:
                maybe_lse[span] = logs


class _Decode(_Module):
    def __init__(self, fake: Fake, *options: Any):
        super().__init__(fake, "decode", options)

    def plan(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        page_locked_int_workspace_buffer: Tensor,
        indptr: Tensor,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        window_left: int,
        logits_soft_cap: float,
        head_dim_qk: int,
        head_dim_vo: int,
        empty_q_data: Tensor,
        empty_kv_data: Tensor,
    ) -> list[int]:
        _host(indptr)
        _of_type(int, batch_size, num_qo_heads, num_kv_heads, page_size, window_left, head_dim_qk, head_dim_vo)
        _of_type(bool, enable_cuda_graph)
        assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "a group size that CUDA-core decoding does not have"
        assert len(indptr) == batch_size + 1
        assert empty_q_data.dtype == empty_kv_data.dtype == self.dtype
        self._keep(int_workspace_buffer, page_locked_int_workspace_buffer, indptr)
        return self._info(enable_cuda_graph, batch_size, batch_size)

    def run(
        self,
        float_workspace_buffer: Tensor,
        int_workspace_buffer: Tensor,
        plan_info_vec: list[int],
        q: Tensor,
        paged_k_cache: Tensor,
        paged_v_cache: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        o: Tensor,
        maybe_lse: Tensor | None,
        kv_layout_code: int,
        window_left: int,
        enable_pdl: bool,
        alibi_slopes: None,
        logits_soft_cap: float,
        sm_scale: float,
        rope_scale: float,
        rope_theta: float,
    ) -> None:
        assert alibi_slopes is None
        assert (kv_layout_code, rope_scale, rope_theta) == (0, 1.0, 1e4)
        assert enable_pdl is self.fake.hopper
        self._check(window_left, logits_soft_cap, sm_scale, q, o, maybe_lse)
        self.fake.runs.append((self.kind, window_left, logits_soft_cap, False))
        rows, page = plan_info_vec[0], paged_k_cache.shape[1]
        planned = int_workspace_buffer[: 4 * (rows + 1)].view(torch.int32)
        assert torch.equal(planned, paged_kv_indptr), "planned for another step"
        pages = paged_kv_indptr.diff()
        lengths = torch.where(pages > 0, (pages - 1) * page + paged_kv_last_page_len, 0).int()
        queries = torch.arange(rows + 1, dtype=torch.int32)
        ints = torch.cat((queries, paged_kv_indptr, lengths)).view(torch.uint8)
        tables = (queries, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        options = (False, window_left, sm_scale, logits_soft_cap)
        self._pages(plan_info_vec, ints, q, (paged_k_cache, paged_v_cache), tables, o, maybe_lse, options)
