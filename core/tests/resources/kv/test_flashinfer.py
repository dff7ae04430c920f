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
from kv_reference import FlashInferOnCPU, reference

from mstar.resources.attention import AttentionNeed, KVBatch, KVMemory, KVPlan, pick_backend
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.attention.flashinfer_check import first_step
from mstar.resources.attention.flashinfer_kernels import KernelFault
from mstar.resources.attention.flashinfer_pages import kernel_page, list_pages, room
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.cross_kv import CrossKV
from mstar.resources.paged_kv import PagedKV
from mstar.resources.staging import Lane, Stage
from mstar.resources.window_kv import WindowKV
from mstar.spec import resources as specs
from mstar.spec.request import EngineRequest

PAGE, PAGES = 4, 12


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_flashinfer.install(monkeypatch)


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


def memory(kv_heads: int = 2, tokens: int = 16 * PAGE * PAGES, dtype: torch.dtype = torch.float32) -> KVMemory:
    made = KVMemory(1, tokens, kv_heads, 8, dtype, "cpu")
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(1)))
    return made


def batch(lengths: list[int], starts: list[int], **fields: Any) -> KVBatch:
    pages = np.random.default_rng(2).permutation(16 * PAGES).astype(np.int32)
    tables = pages[: len(lengths) * PAGES].reshape(len(lengths), PAGES)
    return KVBatch(np.asarray(lengths, np.int64), np.asarray(starts, np.int64), tables, PAGE, **fields)


def queries(count: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(count, heads, 8, generator=torch.Generator().manual_seed(count))


def check(plan: KVPlan, rows: KVBatch, of: KVMemory, heads: int = 4, **how: Any) -> None:
    """*plan*'s results for random queries are the reference's."""
    q = queries(int(rows.lengths.sum()), heads)
    out, begin = plan.attend(0, q, None, None, **how), 0
    size = rows.page_size
    for row, (length, start) in enumerate(zip(rows.lengths.tolist(), rows.starts.tolist(), strict=True)):
        places = (rows.tables[row][:, None] * size + np.arange(size)).reshape(-1)
        end = start + (length if rows.step_kv == "written" else 0)
        k, v = of.data[0, :, torch.from_numpy(places[:end])].double()
        wanted = reference(q[begin : begin + length].double(), k, v, start, **how)
        torch.testing.assert_close(out[begin : begin + length].double(), wanted, rtol=1e-5, atol=2e-6)
        begin += length


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


# --- lanes ----------------------------------------------------------------------------------------------------------
def paged(fake: Fake, query_heads: int = 4) -> PagedKV:
    spec = specs.PagedKV(
        layers=2, kv_heads=2, query_heads=query_heads, head_dim=8, max_tokens=96, page_size=4, windows=(None, 6)
    )
    device = torch.device("cpu")
    return PagedKV("kv", spec, ResourceContext(device, torch.float32, 4, None, [FlashInferOnCPU()], stage=Stage("cpu")))


@pytest.mark.parametrize("heads", [4, 8])
def test_a_lane_is_planned_anew_for_each_step_and_keeps_its_addresses(fake: Fake, heads: int) -> None:
    captured, plain = paged(fake, heads), paged(fake, heads)
    owners = [Owner(name) for name in "ABC"]
    random = torch.Generator().manual_seed(0)

    def draw(count: int, of: int) -> torch.Tensor:
        return torch.randn(count, of, 8, generator=random)

    for resource in (captured, plain):
        for owner in owners:
            assert resource.reserve(owner, resource.units(96))
            resource.open(owner, EngineRequest(id=owner.key))
    prompts = [Row(owner, length) for owner, length in zip(owners, (3, 17, 6), strict=True)]
    packed = [(draw(26, heads), draw(26, 2), draw(26, 2)) for _ in range(2)]
    for resource in (captured, plain):
        view = resource.plan(prompts)
        for layer, qkv in enumerate(packed):
            view.attend(layer, *qkv)
        resource.commit(prompts)

    lane, stage = Lane(4, torch.device("cpu")), captured.context.stage
    views, tables = set(), set()
    for step in range(20):
        rows = [Row(owner) for owner in owners[: 3 - step % 2]]
        stage.begin(lane)
        before = len(fake.plans)
        view = captured.plan(rows)
        assert len(fake.plans) - before == (2 if step else 0)  # both windows' kernels, once they are known
        stage.send()
        views.add(id(view))
        wanted = plain.plan(rows)
        for layer in range(2):
            q, k, v = draw(4, heads), draw(4, 2), draw(4, 2)
            out = view.attend(layer, q, k, v)
            real = len(rows)
            # No window is left out on a lane: its graph must not depend on the contexts' lengths.
            expected = wanted.attend(layer, q[:real], k[:real], v[:real])
            torch.testing.assert_close(out[:real], expected, rtol=1e-5, atol=2e-6)
        tables.add(lane.tensors["kv.pages"][2].data_ptr())
        for resource in (captured, plain):
            resource.commit(rows)
    assert len(views) == len(tables) == 1
    assert len(lane.tensors["kv.pages"][2]) == room(4, 24, 4)


@pytest.mark.parametrize("heads", [4, 8])
def test_a_lane_of_prompts_and_decoding_rows(fake: Fake, heads: int) -> None:
    """Rows of any lengths from step to step; the padding row may be longer than a context can be."""
    captured, plain = paged(fake, heads), paged(fake, heads)
    owners = [Owner(name) for name in "ABC"]
    random, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def draw(count: int, of: int) -> torch.Tensor:
        return torch.randn(count, of, 8, generator=random)

    for resource in (captured, plain):
        for owner in owners:
            assert resource.reserve(owner, resource.units(96))
            resource.open(owner, EngineRequest(id=owner.key))
    stage, device = captured.context.stage, torch.device("cpu")
    lanes = [Lane(4, device, tokens=20), Lane(4, device, tokens=130)]
    for step in range(16):
        lane = lanes[step % 2]
        chosen = rng.permutation(3)[: rng.integers(1, 4)]
        rows = [Row(owners[i], int(rng.integers(1, 6))) for i in chosen]
        real = sum(row.length for row in rows)
        stage.begin(lane)
        before = len(fake.plans)
        view = captured.plan(rows)
        assert fake.plans[before:] == [("fa2", True)] * (2 if step > 1 else 0)
        stage.send()
        wanted = plain.plan(rows)
        for layer in range(2):
            q, k, v = draw(lane.tokens, heads), draw(lane.tokens, 2), draw(lane.tokens, 2)
            out = view.attend(layer, q, k, v)
            assert fake.runs[-1][0] == "fa2"
            assert out.isfinite().all()
            expected = wanted.attend(layer, q[:real], k[:real], v[:real])
            torch.testing.assert_close(out[:real], expected, rtol=1e-5, atol=2e-6)
        assert view.positions.shape == (lane.tokens,)
        assert view.positions[:real].tolist() == wanted.positions.tolist()
        assert int(view.positions[real:].max()) < 4, "padding has no position that a context cannot have"
        for resource in (captured, plain):
            resource.commit(rows)
    captured.check(owners)


def test_the_workspace_of_a_lane_holds_all_tiles_that_its_rows_might_begin(fake: Fake) -> None:
    backend, of = FlashInferOnCPU(), memory()
    stage = Stage("cpu")
    stage.begin(Lane(4, torch.device("cpu"), tokens=60))
    plan = backend.plan_kv(of, batch([33, 20, 7, 0], [3, 0, 9, 0]), stage, "kv")
    stage.send()
    plan.attend(0, queries(60, 8), None, None)
    tiles = -(-60 * 4 // 128) + 4 - 1  # FlashInfer's bound for groups of 4 query heads and tiles of 128
    assert backend.library(torch.device("cpu")).floats(0).shape[0] >= 8 * tiles * 128 * (8 + 1) * 4


def test_a_lane_refuses_what_its_graph_cannot_hold(fake: Fake) -> None:
    backend, of, lane = FlashInferOnCPU(), memory(), Lane(2, torch.device("cpu"))
    stage = Stage("cpu")
    stage.begin(lane)
    with pytest.raises(ValueError, match="one query a row"):
        backend.plan_kv(of, batch([1, 2], [3, 4]), stage, "many")
    frozen = backend.plan_kv(of, batch([1, 1], [3, 4], step_kv="beside"), stage, "beside")
    with pytest.raises(ValueError, match="no kernel"):
        frozen.attend(0, queries(2), *of.data[0, :, :2], window=2)
    with pytest.raises(ValueError, match="has 2 items"):
        backend.plan_ragged([1, 2], stage, "segments")
    plan = backend.plan_kv(of, batch([1, 1], [3, 4], sink=1), stage, "sink")
    with pytest.raises(ValueError, match="no kernel"):
        plan.attend(0, queries(2), None, None, window=2)
    with pytest.raises(ValueError, match="no kernel"):
        plan.attend(0, queries(2).half(), None, None)
    stage.begin(Lane(3, torch.device("cpu"), tokens=8))
    with pytest.raises(ValueError, match="8 queries"):
        backend.plan_kv(of, batch([1, 2, 4], [3, 4, 0]), stage, "few")
    plan = backend.plan_kv(of, batch([1, 2, 5], [3, 4, 0]), stage, "mixed")
    with pytest.raises(ValueError, match="no kernel"):
        plan.attend(0, queries(8), None, None, window=2, causal=False)


def test_a_plan_unlike_the_captured_one_is_never_run(fake: Fake) -> None:
    backend, of, rows = FlashInferOnCPU(), memory(), batch([1, 1], [5, 9])
    stage, fake.jitter = Stage("cpu"), True
    stage.begin(Lane(2, torch.device("cpu")))
    plan = backend.plan_kv(of, rows, stage, "kv")
    stage.send()
    plan.attend(0, queries(2), None, None)
    for _ in range(2):  # nor the second time
        stage.begin(stage.lane)
        with pytest.raises(RuntimeError, match="which a CUDA graph has captured"):
            backend.plan_kv(of, batch([1, 1], [5, 17]), stage, "kv")


def test_a_plan_that_would_be_the_last_one_is_not_made(fake: Fake) -> None:
    backend, of, plain = FlashInferOnCPU(), memory(), FlashInferOnCPU()
    stage, lane = Stage("cpu"), Lane(2, torch.device("cpu"))
    made = []
    for starts in ([5, 9], [6, 10], [7, 11], [8, 12], [4, 12]):  # pages of four tokens
        rows, before = batch([1, 1], starts), len(fake.plans)
        stage.begin(lane)
        plan = backend.plan_kv(of, rows, stage, "kv")
        stage.send()
        q = queries(2)
        out = plan.attend(0, q, None, None)
        made.append(len(fake.plans) - before)
        wanted = plain.plan_kv(of, rows, Stage("cpu"), "kv").attend(0, q, None, None)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    assert made == [1, 0, 0, 1, 1]


def test_a_lane_can_read_a_memory_that_the_step_does_not_write(fake: Fake) -> None:
    backend, of = FlashInferOnCPU(), memory()
    stage, lane = Stage("cpu"), Lane(2, torch.device("cpu"))
    for starts in ([5, 9], [30, 1]):
        stage.begin(lane)
        rows = batch([1, 1], starts, step_kv="none")
        plan = backend.plan_kv(of, rows, stage, "kv")
        stage.send()
        check(plan, rows, of, causal=False)


@pytest.mark.parametrize("causal", [False, True])
def test_a_lane_of_frozen_steps(fake: Fake, causal: bool) -> None:
    """Rows of any lengths beside contexts of any lengths, none included; of one query each too."""
    backend, of, stage = FlashInferOnCPU(), memory(), Stage("cpu")
    mixed, single = Lane(3, torch.device("cpu"), tokens=9), Lane(3, torch.device("cpu"))
    steps = [([5, 4, 0], [7, 3, 0]), ([1, 2, 6], [0, 9, 0]), ([2, 2, 5], [0, 0, 0]), ([1, 1, 1], [4, 0, 0])] * 2
    plans = set()
    for lengths, starts in steps:
        lane = single if max(lengths) == 1 else mixed
        stage.begin(lane)
        rows = batch(lengths, starts, step_kv="beside")
        plan = backend.plan_kv(of, rows, stage, "kv")
        plans.add(id(plan))
        stage.send()
        q, own = queries(lane.tokens), torch.randn(2, lane.tokens, 2, 8)
        out = plan.attend(0, q, own[0], own[1], causal=causal)
        wanted = TorchAttention().plan_kv(of, rows, Stage("cpu"), "kv").attend(0, q, own[0], own[1], causal=causal)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    assert len(plans) == 2
    assert {kind for kind, *_ in fake.runs} == {"ragged fa2", "fa2"}


@pytest.mark.parametrize("causal", [False, True])
def test_a_lane_of_segments(fake: Fake, causal: bool) -> None:
    backend, stage, lane = FlashInferOnCPU(), Stage("cpu"), Lane(4, torch.device("cpu"), tokens=12)
    plans, addresses = set(), set()
    for lengths in ([5, 7, 0, 0], [1, 2, 9, 0], [3, 3, 3, 3]):
        stage.begin(lane)
        before = len(fake.plans)
        plan = backend.plan_ragged(lengths, stage, "segments")
        assert fake.plans[before:] == ([("fa2", True)] if plans else [])
        plans.add(id(plan))
        addresses.add(lane.tensors["segments.segments"][2].data_ptr())
        stage.send()
        q, own = queries(12), torch.randn(2, 12, 2, 8)
        out = plan.attend(q, own[0], own[1], causal=causal)
        wanted = TorchAttention().plan_ragged(lengths, stage, "wanted").attend(q, own[0], own[1], causal=causal)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=2e-6)
    assert len(plans) == len(addresses) == 1


@pytest.mark.parametrize("sink", [0, 2])
def test_a_lane_over_rings(fake: Fake, sink: int) -> None:
    """Contexts that have gone round their rings, new ones among them, and padding: as plain steps."""

    def ring() -> WindowKV:
        spec = specs.WindowKV(kv_heads=2, query_heads=4, head_dim=8, window=6, sink=sink, max_step=3)
        context = ResourceContext(torch.device("cpu"), torch.float32, 4, None, [FlashInferOnCPU()], stage=Stage("cpu"))
        return WindowKV("ring", spec, context)

    captured, plain = ring(), ring()
    owners, rng, device = [Owner(name) for name in "ABC"], np.random.default_rng(0), torch.device("cpu")
    for resource in (captured, plain):
        for owner in owners:
            assert resource.reserve(owner, 1)
            resource.open(owner, EngineRequest(id=owner.key))
    lanes = [Lane(4, device), Lane(4, device, tokens=40)]
    for step in range(40):
        lane = lanes[0 if sink else step % 2]  # sinks outside of a window need a row's only query
        single = lane.tokens == lane.rows
        chosen = [owners[i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
        rows = [Row(owner, 1 if single else int(rng.integers(1, 4))) for owner in chosen]
        real = sum(row.length for row in rows)
        captured.context.stage.begin(lane)
        view = captured.plan(rows)
        captured.context.stage.send()
        q, k, v = queries(lane.tokens), torch.randn(lane.tokens, 2, 8), torch.randn(lane.tokens, 2, 8)
        out = view.attend(0, q, k, v)
        wanted = plain.plan(rows)
        assert out.isfinite().all()
        torch.testing.assert_close(out[:real], wanted.attend(0, q[:real], k[:real], v[:real]), rtol=1e-5, atol=2e-6)
        assert view.positions[:real].tolist() == wanted.positions.tolist()
        for resource in (captured, plain):
            resource.commit(rows)
            if step % 5 == 3:  # a step that should not have been, though it has overwritten the ring's oldest tokens
                resource.retract(rows[0])


def test_a_lane_over_memories_of_an_encoder(fake: Fake) -> None:
    spec = specs.CrossKV(kv_heads=2, query_heads=4, head_dim=8, max_tokens=20)
    context = ResourceContext(torch.device("cpu"), torch.float32, 4, None, [FlashInferOnCPU()], stage=Stage("cpu"))
    cross, device = CrossKV("memory", spec, context), torch.device("cpu")
    owners = [Owner(name) for name in "ABC"]
    for owner in owners:
        assert cross.reserve(owner, 1)
        cross.open(owner, EngineRequest(id=owner.key))
    prime = [Row(owner, length) for owner, length in zip(owners, (20, 3, 9), strict=True)]
    assert cross.variant(prime) is None, "what is to be written is not written in a graph"
    cross.plan(prime).write(0, torch.randn(32, 2, 8), torch.randn(32, 2, 8))
    cross.commit(prime)
    lanes, stage = [Lane(4, device), Lane(4, device, tokens=11)], cross.context.stage
    for step, chosen in enumerate(([0, 1, 2], [2, 0], [1], [2, 1, 0], [0], [1, 2])):
        lane = lanes[step % 2]
        rows = [Row(owners[i], 1 if lane.tokens == 4 else 1 + i) for i in chosen]
        real = sum(row.length for row in rows)
        assert cross.variant(rows) == ()
        q = queries(lane.tokens)
        stage.begin()
        wanted = cross.plan(rows).attend(0, q[:real])
        stage.begin(lane)
        view = cross.plan(rows)
        stage.send()
        torch.testing.assert_close(view.attend(0, q)[:real], wanted, rtol=1e-5, atol=2e-6)
        cross.commit(rows)
    with pytest.raises(IntegrityError, match="captured step"):
        view.write(0, torch.zeros(11, 2, 8), torch.zeros(11, 2, 8))
    with pytest.raises(IntegrityError, match="lengths only"):
        view.attend(0, q, [5, 6, 0, 0])


def test_a_lane_over_the_same_memories_is_planned_once(fake: Fake) -> None:
    spec = specs.CrossKV(kv_heads=2, query_heads=4, head_dim=8, max_tokens=200)
    context = ResourceContext(torch.device("cpu"), torch.float32, 4, None, [FlashInferOnCPU()], stage=Stage("cpu"))
    cross, lane, stage = CrossKV("memory", spec, context), Lane(2, torch.device("cpu")), context.stage

    def listen(name: str, length: int) -> Row:
        owner = Owner(name)
        assert cross.reserve(owner, 1)
        cross.open(owner, EngineRequest(id=name))
        stage.begin()
        cross.plan([Row(owner, length)]).write(0, torch.randn(length, 2, 8), torch.randn(length, 2, 8))
        cross.commit([Row(owner, length)])
        return Row(owner)

    def step(*rows: Row) -> bool:
        """Whether it was planned."""
        q = queries(2)
        stage.begin()
        wanted = cross.plan(rows).attend(0, q[: len(rows)])
        before = len(fake.plans)
        stage.begin(lane)
        view = cross.plan(rows)
        stage.send()
        torch.testing.assert_close(view.attend(0, q)[: len(rows)], wanted, rtol=1e-5, atol=2e-6)
        cross.commit(rows)
        return len(fake.plans) > before

    a, b = listen("A", 130), listen("B", 3)
    assert [step(a, b) for _ in range(3)] == [True, False, False]
    assert [step(b, a), step(b, a), step(a)] == [True, False, True]
    cross.close(a.owner)
    again = listen("A", 60)  # whose row is another
    assert [step(again, b), step(again, b)] == [True, False]
    cross.close(again.owner)
    listen("A", 170)
    assert step(again, b), "a row that is known may have another memory"


def test_no_way_of_attending_is_new_during_a_capture(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, stage = FlashInferOnCPU(), Stage("cpu")
    stage.begin(Lane(2, torch.device("cpu")))
    plan: Any = backend.plan_kv(memory(), batch([1, 1], [5, 9]), stage, "kv")
    stage.send()
    plan.attend(0, queries(2), None, None)
    plan._rows.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan.attend(0, queries(2), None, None)
    with pytest.raises(RuntimeError, match="before the capture"):
        plan.attend(0, queries(2), None, None, window=3)
