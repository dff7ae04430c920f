"""The FlashInfer backend on a stand-in for the library: which kernels get what, and when they are planned."""

from __future__ import annotations

import logging
import sys
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_flashinfer import Fake
from flashinfer_steps import PAGE, batch, check, memory, queries
from kv_reference import FlashInferOnCPU, reference

from mstar.resources.attention import AttentionNeed, pick_backend
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.attention.flashinfer_check import first_step
from mstar.resources.attention.flashinfer_kernels import KernelFault
from mstar.resources.attention.flashinfer_pages import kernel_page, list_pages, room
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.staging import Lane, Stage


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pretends a GPU of the compute capability in the list."""
    found = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found[0])
    return found


def need(**fields: Any) -> AttentionNeed:
    common = {"mode": "kv", "device": torch.device("cuda", 0), "dtype": torch.bfloat16}
    sizes = {"query_heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16}
    return AttentionNeed(**{**common, **sizes, **fields})


# --- what it serves -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": torch.device("cpu")}, "CUDA only"),
        ({"dtype": torch.float32}, "float32"),
        ({"kv_dtype": torch.float16}, "bfloat16, not in torch.float16"),
        ({"head_dim": 80}, "head_dim 80, only for 64, 128 and 256"),
        ({"query_heads": 5}, "multiple of 2"),
    ],
)
def test_what_it_does_not_support_is_said(gpu: list[tuple[int, int]], fields: dict[str, Any], reason: str) -> None:
    assert reason in (FlashInferAttention().supports(need(**fields)) or "")


def test_an_old_gpu_is_refused(gpu: list[tuple[int, int]]) -> None:
    gpu[0] = (7, 5)
    assert "8.0 or newer, not 7.5" in (FlashInferAttention().supports(need()) or "")


def test_a_library_that_is_missing_or_broken_is_said_and_the_next_backend_serves(
    gpu: list[tuple[int, int]], fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FlashInferAttention()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with caplog.at_level(logging.WARNING):
        assert pick_backend([TorchAttention(), backend], need()).name == "torch_sdpa"
    assert "torch_sdpa is used: flashinfer: it " in caplog.text
    monkeypatch.setattr("mstar.resources.attention.flashinfer.Library", lambda device: 1 / 0)
    assert "first step with it failed: ZeroDivisionError" in (FlashInferAttention().supports(need()) or "")


def on_cpu(**fields: Any) -> AttentionNeed:
    return need(device=torch.device("cpu"), **fields)


@pytest.mark.parametrize("page_size", [1, 16, 1500])
@pytest.mark.parametrize("mode", ["kv", "ragged"])
@pytest.mark.parametrize("heads", [4, 8])
def test_the_first_step_passes_and_tells_a_wrong_result(fake: Fake, heads: int, mode: str, page_size: int) -> None:
    wanted = on_cpu(mode=mode, query_heads=heads, page_size=page_size, windows=frozenset({7}))
    assert first_step(FlashInferOnCPU(), wanted) is None
    kinds = {kind for kind, *_ in fake.runs}
    if mode == "ragged":
        assert kinds == {"ragged fa2", "ragged fa3"}
    else:
        assert kinds == {"decode", "fa2", "fa3"} if heads == 4 else kinds == {"fa2", "fa3"}
        assert {window for _, window, *_ in fake.runs} == {-1, 3}
    fake.error = 0.2
    assert "differs from PyTorch's by 0.2" in (first_step(FlashInferOnCPU(), wanted) or "")


def test_the_first_step_names_a_kernel_that_cannot_be_built_also_the_second_time(fake: Fake) -> None:
    fake.broken.add("fa3")
    backend = FlashInferOnCPU()
    for kv_heads in (2, 1):
        assert "no fa3 kernel" in (first_step(backend, on_cpu(kv_heads=kv_heads)) or "")


# --- the arrays -----------------------------------------------------------------------------------------------------
def test_page_lists_equal_their_definition() -> None:
    random = np.random.default_rng(0)
    for size in (1, 4, 16, 30, 128, 1500):
        page = kernel_page(size)
        assert page <= 64
        assert size % page == 0
        for _ in range(8):
            rows = int(random.integers(1, 7))
            lengths = random.integers(1, 9, rows)
            tokens = random.integers(0, 3 * size + 1, rows)
            tables = random.integers(0, 999, (rows, 4)).astype(np.int32)
            got = list_pages(lengths, tokens, tables, size)
            starts, indptr, last, indices = [0], [0], [], []
            for row in range(rows):
                places = [tables[row, i // size] * size + i % size for i in range(tokens[row])]
                own = [places[i] // page for i in range(0, len(places), page)]
                starts.append(starts[-1] + int(lengths[row]))
                indptr.append(indptr[-1] + len(own))
                last.append(len(places) - page * (len(own) - 1) if own else 0)
                indices += own
            assert got.packed.dtype == got.kv_lengths.dtype == np.int32
            assert got.packed.tolist() == starts + indptr + last + indices
            assert got.kv_lengths.tolist() == tokens.tolist()
            assert (got.rows, got.queries) == (rows, starts[-1])
            assert len(got.packed) <= room(rows, 4, size)
    assert len(list_pages(np.ones(3, np.int64), np.full(3, 256), np.zeros((3, 2), np.int32), 128).packed) == room(
        3, 2, 128
    )


# --- kernels for steps ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("heads", "kind"), [(4, "decode"), (8, "fa2")])
def test_single_queries_decode_and_prompts_behind_them_do_not(fake: Fake, heads: int, kind: str) -> None:
    of, rows = memory(), batch([1, 1, 5, 1], [9, 0, 2, 40])
    plan = FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv")
    check(plan, rows, of, heads)
    check(plan, rows, of, heads, window=6, softcap=2.0)
    assert [run[:3] for run in fake.runs] == [(kind, -1, 0), ("fa2", -1, 0), (kind, 5, 2.0), ("fa2", 5, 2.0)]
    check(plan, rows, of, heads)
    assert len(fake.plans) == 4  # nothing is planned twice in a step


@pytest.mark.parametrize("hopper", [True, False])
def test_long_prompts_use_fa3_on_hopper(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    fake, of, rows = fake_flashinfer.install(monkeypatch, hopper), memory(tokens=2048), batch([100, 40], [3, 1])
    rows.tables = np.arange(128, dtype=np.int32).reshape(2, 64)
    plan = FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv")
    check(plan, rows, of)
    check(plan, rows, of, window=30)
    assert [kind for kind, *_ in fake.runs] == ["fa3" if hopper else "fa2", "fa2"]


def test_a_window_wider_than_all_contexts_is_none(fake: Fake) -> None:
    of, rows = memory(), batch([3, 1], [9, 11])
    check(FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv"), rows, of, window=12)
    assert [run[1] for run in fake.runs] == [-1]


def test_rings_without_sinks_stay_on_flashinfer_when_they_forget(fake: Fake) -> None:
    of, rows = memory(), batch([1, 1], [7, 3])
    rows.gaps = np.asarray([20, 0])
    plan = FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv")
    check(plan, rows, of, window=8)
    rows.sink = 2
    sinks = FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv")
    assert len(fake.runs) == 1
    sinks.attend(0, queries(2), None, None, window=6)
    assert len(fake.runs) == 1


def test_plans_that_are_alive_together_do_not_disturb_each_other(fake: Fake) -> None:
    backend, of, stage = FlashInferOnCPU(), memory(), Stage("cpu")
    steps = [batch([3, 2], [5, 9]), batch([2, 6, 4], [0, 31, 7])]
    plans = [backend.plan_kv(of, rows, stage, "kv") for rows in steps]
    for plan, rows in (*zip(plans, steps, strict=True), *zip(plans, steps, strict=True)):
        check(plan, rows, of)
    assert len(fake.plans) == 4


@pytest.mark.parametrize("starts", [[0, 0], [9, 0], [9, 21]])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_beside_the_memory_are_merged(fake: Fake, starts: list[int], causal: bool) -> None:
    of, rows = memory(), batch([5, 3], starts, step_kv="beside")
    q, own = queries(8), torch.randn(2, 8, 2, 8)
    plan = FlashInferOnCPU().plan_kv(of, rows, Stage("cpu"), "kv")
    out = plan.attend(0, q, own[0], own[1], causal=causal, softcap=3.0)
    begin = 0
    for row, (length, start) in enumerate(zip([5, 3], starts, strict=True)):
        places = (rows.tables[row][:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:start]
        span = slice(begin, begin + length)
        k, v = torch.cat((of.data[0, :, torch.from_numpy(places)], own[:, span]), 1).double()
        wanted = reference(q[span].double(), k, v, start, causal=causal, softcap=3.0)
        torch.testing.assert_close(out[span].double(), wanted, rtol=1e-5, atol=2e-6)
        begin += length
    assert [kind for kind, *_ in fake.runs] == ["ragged fa2", "fa2"][: 1 + any(starts)]


def test_a_kernel_that_cannot_be_built_is_said_once_and_torch_serves(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.broken.add("decode")
    backend, of, rows = FlashInferOnCPU(), memory(), batch([1, 1], [5, 9])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check(backend.plan_kv(of, rows, Stage("cpu"), "kv"), rows, of)
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer: it has no decode kernel, torch.float32, head_dim 8: RuntimeError: ninja: build of decode stopped"
    ]
    assert not fake.runs
    stage = Stage("cpu")
    stage.begin(Lane(2, torch.device("cpu")))
    plan = backend.plan_kv(of, rows, stage, "kv")
    with pytest.raises(KernelFault, match="no decode kernel"):
        plan.attend(0, queries(2), None, None)


def test_a_step_takes_the_queries_it_was_planned_for(fake: Fake) -> None:
    backend, of = FlashInferOnCPU(), memory()
    for lengths in ([1, 1], [1, 3]):
        plan = backend.plan_kv(of, batch(lengths, [5, 9]), Stage("cpu"), "kv")
        for count in (sum(lengths) - 1, sum(lengths) + 1):
            with pytest.raises(ValueError, match="planned for"):
                plan.attend(0, queries(count), None, None)


def test_the_workspace_grows_to_what_a_kernel_may_need(fake: Fake) -> None:
    backend, of = FlashInferOnCPU(), memory()
    library = backend.library(torch.device("cpu"))
    library.work = 264
    rows = batch([40, 1], [5, 9])
    for heads in (4, 16):
        check(backend.plan_kv(of, rows, Stage("cpu"), "kv"), rows, of, heads)
        assert library.floats(0).shape[0] >= heads * (264 // 2) * 128 * (8 + 1) * 4
