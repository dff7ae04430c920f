"""Steps of the FlashInfer backend whose launches are captured: what is planned anew, and what stays where it is."""

from __future__ import annotations

from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from fake_flashinfer import Fake
from flashinfer_steps import batch, check, memory, queries
from kv_reference import FlashInferOnCPU

from mstar.resources.attention.flashinfer_pages import room
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.cross_kv import CrossKV
from mstar.resources.paged_kv import PagedKV
from mstar.resources.ragged import RaggedAttention
from mstar.resources.staging import Lane, Stage
from mstar.resources.window_kv import WindowKV
from mstar.spec import resources as specs
from mstar.spec.request import EngineRequest


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


@pytest.mark.parametrize(("hopper", "kind"), [(True, "fa3"), (False, "fa2")])
def test_windows_are_planned_once_for_all_lanes(hopper: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_flashinfer.install(monkeypatch, hopper)
    spec = specs.RaggedAttention(4, 2, 8, backend="flashinfer")
    context = ResourceContext(torch.device("cpu"), torch.float32, 4, None, [FlashInferOnCPU()], stage=Stage("cpu"))
    resource, owners = RaggedAttention("windows", spec, context), [Owner(name) for name in "AB"]
    lanes = [Lane(2, torch.device("cpu"), {"windows": ()}) for _ in range(2)]
    for lane in (*lanes, *lanes):
        context.stage.begin(lane)
        view = resource.plan([Row(owner) for owner in owners])
        context.stage.send()
        for length in (70, 65):  # of pictures, and of pictures with their words
            q, k, v = torch.randn(2, length, 4, 8), *torch.randn(2, 2, length, 2, 8)
            wanted = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
            )
            torch.testing.assert_close(view.attend_windows(q, k, v), wanted.transpose(1, 2), rtol=1e-5, atol=2e-6)
    assert fake.plans == [(kind, False)] * 2
    assert {run[0] for run in fake.runs} == {f"ragged {kind}"}
    monkeypatch.setattr("mstar.resources.attention.flashinfer_rows._capturing", lambda device: True)
    view.attend_windows(q, k, v)
    with pytest.raises(RuntimeError, match="did not occur before the capture"):
        view.attend_windows(q[:, :64], k[:, :64], v[:, :64])


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
