"""The decoding kernel against attention in float32, and the plans that use it.

Run by ``test_cuda_cases.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
it there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.nn.ops import HeadNorms, cuda_attention, reference
from mstar.nn.ops.cuda_attention import MOST_SPLITS, Scratch, decode_heads, splits_for
from mstar.nn.rotary import Rotation
from mstar.resources.attention import KVBatch, KVMemory, triton_decode
from mstar.resources.base import Owner, ResourceContext, Row
from mstar.resources.paged_kv import PagedKV
from mstar.resources.staging import Lane, Stage
from mstar.spec import resources as specs
from mstar.spec.request import EngineRequest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# Of results of about 1: queries, keys, weights and results are rounded once each. The interpreter multiplies no
# matrices of bfloat16.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

# numpy, which interprets the kernels, warns where a GPU computes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Contexts:
    """Rows with contexts in shuffled pages, whose tensors keep their addresses from step to step."""

    def __init__(self, rows: int, kv_heads: int, size: int, dtype: torch.dtype, page: int = 16, most: int = 320):
        self.rows, self.kv_heads, self.size, self.dtype, self.page = rows, kv_heads, size, dtype, page
        self.random = np.random.default_rng(rows)
        self.torch = torch.Generator().manual_seed(rows)
        self.per_row = -(-most // page)
        self.tables = self.random.permutation(rows * self.per_row + 1)[:-1].reshape(rows, -1)
        width = kv_heads * size
        tokens = (rows * self.per_row + 1) * page
        self.keys, self.values = (self.draw(tokens, width) for _ in range(2))
        self.places = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE)
        self.last = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        self.indices = torch.zeros(rows * self.per_row, dtype=torch.int32, device=DEVICE)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.torch).to(self.dtype).to(DEVICE)

    def at(self, row: int, length: int) -> Tensor:
        """Places of the first *length* tokens of *row*."""
        token = np.arange(length)
        return torch.from_numpy(self.tables[row, token // self.page] * self.page + token % self.page).to(DEVICE)

    def fill(self, lengths: list[int]) -> None:
        """What the host stages for a step in which contexts reach *lengths*."""
        pages = [-(-length // self.page) for length in lengths]
        used = np.concatenate([self.tables[row, :count] for row, count in enumerate(pages)])
        self.indices[: len(used)] = torch.from_numpy(used.astype(np.int32)).to(DEVICE)
        self.indptr[1:] = torch.tensor(np.cumsum(pages), dtype=torch.int32)
        self.last[:] = torch.tensor([n - (p - 1) * self.page for n, p in zip(lengths, pages, strict=True)])
        self.places[:] = torch.stack([self.at(row, length)[-1] for row, length in enumerate(lengths)])

    def inputs(self, group: int, normed: bool) -> tuple[Tensor, int, Tensor, Tensor, HeadNorms | None]:
        """The first arguments of ``decode_heads``; rows of the heads have gaps."""
        count = (group + 2) * self.kv_heads
        heads = self.draw(self.rows, (count + 1) * self.size)[:, : count * self.size]
        inverse = torch.cat((-torch.ones(self.size // 2), torch.ones(self.size // 2))) * 0.37
        cos, sin = reference.rotation(torch.arange(self.rows), inverse, 1.0, self.dtype)
        norms = HeadNorms(self.draw(self.size), self.draw(self.size).float(), 1e-5) if normed else None
        return heads.view(self.rows, count, self.size), group * self.kv_heads, cos.to(DEVICE), sin.to(DEVICE), norms

    def step(self, inputs: tuple[Any, ...], scratch: Scratch, splits: int, **how: Any) -> Tensor:
        tables = (self.indptr, self.last, self.indices)
        cache = (self.keys, self.values, self.places)
        out = decode_heads(*inputs, *cache, tables, self.page, scratch, splits, **how)
        assert out is not None
        return out

    def answer(self, lengths: list[int], inputs: tuple[Any, ...], **how: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Attention in float32, and the keys and values that are to be stored. Reads the memory before a step."""
        heads, q_heads, cos, sin, norms = inputs
        wide = None if norms is None else HeadNorms(norms.q.float(), norms.k.float(), norms.eps)
        q, k, v = reference.rotate_store(heads.float(), q_heads, cos.float(), sin.float(), wide, None, None, None)
        out = []
        for row, length in enumerate(lengths):
            old = self.at(row, length - 1)
            own = (x[row : row + 1].flatten(1) for x in (k, v))
            keys, values = (
                torch.cat((cache[old].float(), new)).view(length, self.kv_heads, self.size)
                for cache, new in zip((self.keys, self.values), own, strict=True)
            )
            out.append(attention(q[row], keys, values, **how))
        return torch.stack(out), k.flatten(1), v.flatten(1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q ``[heads, size]`` over k, v ``[tokens, kv_heads, size]``, whose last token is the query's own."""
    shared, first = q.shape[0] // k.shape[1], 0 if window is None else max(k.shape[0] - window, 0)
    k, v = k[first:].repeat_interleave(shared, 1), v[first:].repeat_interleave(shared, 1)
    logits = torch.einsum("hd,lhd->hl", q, k) * (q.shape[1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.einsum("hl,lhd->hd", torch.softmax(logits, -1), v)


def scratch_for(contexts: Contexts, splits: int) -> Scratch:
    return Scratch(contexts.rows * contexts.kv_heads * splits, contexts.size, DEVICE)


def check(
    contexts: Contexts, scratch: Scratch, splits: int, lengths: list[int], group: int, normed: bool = False, **how: Any
) -> None:
    contexts.fill(lengths)
    inputs = contexts.inputs(group, normed)
    wanted, k, v = contexts.answer(lengths, inputs, **how)
    before = contexts.keys.clone(), contexts.values.clone()
    got = contexts.step(inputs, scratch, splits, **how)
    limit = TOLERANCE[contexts.dtype]
    torch.testing.assert_close(got.float(), wanted, rtol=limit, atol=limit)
    torch.testing.assert_close(contexts.keys[contexts.places].float(), k, rtol=limit, atol=limit)
    assert torch.equal(contexts.values[contexts.places].float(), v)
    others = torch.ones(len(contexts.keys), dtype=torch.bool, device=DEVICE).index_fill(0, contexts.places, False)
    for now, then in zip((contexts.keys, contexts.values), before, strict=True):
        assert torch.equal(now[others], then[others])
    assert not scratch.counters.any()


@pytest.mark.parametrize(
    ("group", "normed", "splits", "page"),
    [(1, True, 4, 16), (2, False, 1, 64), (3, True, 4, 32), (4, False, 8, 16), (8, True, 2, 16), (16, False, 4, 16)],
)
def test_steps_over_contexts_that_change(group: int, normed: bool, splits: int, page: int) -> None:
    """The same tensors, filled anew, as for replays of a graph."""
    contexts = Contexts(3, 2, 64, torch.float16, page)
    scratch = scratch_for(contexts, splits)
    for lengths in ([1, 300, 65], [64, 2, 66], [129, 128, 1]):
        check(contexts, scratch, splits, lengths, group, normed)


def test_a_long_context_is_divided_and_the_others_are_not() -> None:
    contexts, lengths = Contexts(3, 1, 64, torch.float16, most=4000), [2600, 40, 1000]
    contexts.fill(lengths)
    inputs = contexts.inputs(2, True)
    wanted, _, _ = contexts.answer(lengths, inputs)
    scratch = scratch_for(contexts, 4)
    whole = contexts.step(inputs, scratch, 1)
    divided = contexts.step(inputs, scratch, 4, usual=1)
    torch.testing.assert_close(divided.float(), wanted, rtol=4e-3, atol=4e-3)
    assert torch.equal(divided[1:], whole[1:])
    assert not torch.equal(divided[0], whole[0])  # summed up in shares
    assert not scratch.counters.any()


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_head_sizes_and_dtypes(dtype: torch.dtype, size: int) -> None:
    contexts = Contexts(2, 1, size, dtype)
    check(contexts, scratch_for(contexts, 4), 4, [200, 33], 2, True)


def test_every_length() -> None:
    """In the interpreter, which is slow, those around the borders of blocks and pages."""
    contexts = Contexts(8, 1, 64, torch.float16, 16)
    scratch = scratch_for(contexts, 4)
    some = [2, 15, 16, 17, 18, 63, 64, 65, 66, 127, 128, 129, 130, 191, 193, 194, 255, 256, 257, 258, 298, 299, 300, 1]
    lengths = some if INTERPRETED else [*range(1, 301), 7, 8, 9, 10]
    for first in range(0, len(lengths), 8):
        check(contexts, scratch, 4, lengths[first : first + 8], 2)


@pytest.mark.parametrize("window", [1, 2, 64, 65, 100, 1000])
def test_windows(window: int) -> None:
    contexts = Contexts(4, 1, 64, torch.float16)
    scratch = scratch_for(contexts, 2)
    for lengths in ([1, 64, 65, 66], [129, 193, 257, 2]):
        check(contexts, scratch, 2, lengths, 2, window=window)


@pytest.mark.parametrize("how", [{"softcap": 2.0}, {"scale": 0.5}, {"softcap": 20.0, "scale": 0.3, "window": 40}])
def test_scales_and_soft_caps(how: dict[str, Any]) -> None:
    contexts = Contexts(2, 2, 64, torch.float16)
    check(contexts, scratch_for(contexts, 4), 4, [1, 90], 3, True, **how)


def test_large_logits_are_no_infinities() -> None:
    contexts = Contexts(2, 1, 64, torch.float16)
    contexts.keys *= 3000
    for softcap in (None, 5.0):
        contexts.fill([5, 200])
        inputs = contexts.inputs(2, False)
        assert contexts.step(inputs, scratch_for(contexts, 2), 2, softcap=softcap).isfinite().all()


def test_a_nan_stays_in_its_row() -> None:
    contexts = Contexts(3, 1, 64, torch.float16)
    contexts.fill([70, 150, 3])
    inputs = contexts.inputs(2, False)
    inputs[0][1, 0, 5] = torch.nan
    got = contexts.step(inputs, scratch_for(contexts, 4), 4)
    assert got.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_a_row_is_computed_alike_alone_and_among_others() -> None:
    together, lengths = Contexts(4, 1, 64, torch.float16), [17, 300, 1, 128]
    together.fill(lengths)
    inputs = together.inputs(2, True)
    heads, q_heads, cos, sin, norms = inputs
    splits = MOST_SPLITS
    wanted = together.step(inputs, scratch_for(together, splits), splits)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        pages = torch.from_numpy(together.tables[row].astype(np.int32)).to(DEVICE)
        bounds = torch.tensor([0, -(-length // 16)], dtype=torch.int32, device=DEVICE)
        got = decode_heads(
            heads[own], q_heads, cos[own].contiguous(), sin[own].contiguous(), norms, together.keys, together.values,
            together.places[own], (bounds, together.last[own], pages), 16, scratch_for(together, splits), splits,
        )  # fmt: skip
        assert got is not None
        assert torch.equal(got[0], wanted[row])


def test_rows_that_pad_a_step_share_a_place() -> None:
    contexts = Contexts(4, 1, 64, torch.float16)
    contexts.tables[1:, 0] = contexts.tables[1, 0]
    contexts.fill([40, 1, 1, 1])
    inputs = contexts.inputs(2, False)
    wanted, _, _ = contexts.answer([40, 1, 1, 1], inputs)
    got = contexts.step(inputs, scratch_for(contexts, 4), 4)
    torch.testing.assert_close(got.float(), wanted, rtol=4e-3, atol=4e-3)


def test_what_the_kernel_does_not_take_is_left_alone() -> None:
    contexts = Contexts(2, 1, 64, torch.float16)
    contexts.fill([3, 9])
    inputs = contexts.inputs(2, True)
    heads, q_heads, cos, sin, norms = inputs
    tables, scratch = (contexts.indptr, contexts.last, contexts.indices), scratch_for(contexts, 1)
    cache = (contexts.keys, contexts.values, contexts.places)
    before = contexts.keys.clone()
    odd = heads.transpose(1, 2).contiguous().transpose(1, 2)  # elements of a head are not neighbours
    wide = contexts.draw(2, 19, 64)
    for first in (
        (heads.float(), q_heads, cos, sin, norms),
        (odd, q_heads, cos, sin, norms),
        (heads, q_heads, cos.float(), sin.float(), norms),
        (heads[:, :, :48], q_heads, cos[:, :, :48], sin[:, :, :48], None),
        (wide, 17, cos, sin, None),
    ):
        assert decode_heads(*first, *cache, tables, 16, scratch, 1) is None
    assert torch.equal(contexts.keys, before)
    with pytest.raises(ValueError, match="scratch"):
        decode_heads(*inputs, *cache, tables, 16, scratch, 4)
    empty = (heads[:0], q_heads, cos[:0], sin[:0], norms)
    out = decode_heads(*empty, contexts.keys, contexts.values, contexts.places[:0], tables, 16, scratch, 1)
    assert out is not None
    assert out.shape == (0, 2, 64)


def test_more_rows_are_divided_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_processors", lambda device: 132)
    assert [splits_for(rows, 8, DEVICE) for rows in (1, 2, 4, 8, 16, 32)] == [16, 16, 8, 4, 2, 1]
    assert splits_for(1, 1, DEVICE) == MOST_SPLITS


# --- plans ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes pools of one layer with windows and one without, on FlashInfer or, without a GPU, its stand-in."""
    if not INTERPRETED:
        from mstar.resources.attention.flashinfer import FlashInferAttention as backend
    else:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "resources" / "kv"))
        import fake_flashinfer
        from kv_reference import FlashInferOnCPU as backend  # type: ignore[assignment]

        fake = fake_flashinfer.install(monkeypatch)
        monkeypatch.setattr(triton_decode, "_kernels", lambda device: cuda_attention)

    def make() -> PagedKV:
        spec = specs.PagedKV(
            layers=2, kv_heads=2, query_heads=4, head_dim=64, max_tokens=256, page_size=16, windows=(None, 20)
        )
        return PagedKV("kv", spec, ResourceContext(DEVICE, torch.float16, 20, None, [backend()], stage=Stage(DEVICE)))

    make.plans = fake.plans if INTERPRETED else []  # type: ignore[attr-defined]
    return make


def open_rows(resource: PagedKV, count: int) -> list[Owner]:
    owners = [Owner(f"row {i}") for i in range(count)]
    for owner in owners:
        assert resource.reserve(owner, resource.units(256))
        resource.open(owner, EngineRequest(id=owner.key))
    return owners


def attend(resource: PagedKV, view: Any, drawn: Tensor, norms: HeadNorms) -> list[Tensor]:
    cos, sin = reference.rotation(torch.arange(drawn.shape[1]), ANGLES, 1.0, torch.float16)
    rotation = Rotation(cos.to(DEVICE), sin.to(DEVICE))
    return [view.attend_heads(layer, drawn[layer].clone(), 4, rotation, norms) for layer in range(2)]


ANGLES = torch.cat((-torch.ones(32), torch.ones(32))) * 0.2


@pytest.mark.parametrize("on_lane", [False, True])
def test_steps_of_few_rows_are_the_kernels_and_agree_with_two(
    paged: Any, on_lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, plain = paged(), paged()
    random = torch.Generator().manual_seed(0)
    norms = HeadNorms(*(torch.rand(64, generator=random).half().to(DEVICE) for _ in range(2)), 1e-6)
    owners = {id(resource): open_rows(resource, 3) for resource in (fused, plain)}
    used: list[int] = []
    kernel = cuda_attention.decode_heads
    monkeypatch.setattr(cuda_attention, "decode_heads", lambda *a, **k: used.append(1) or kernel(*a, **k))
    lane, views = Lane(4, DEVICE), set()
    for step in range(5):
        lengths = [70, 3, 30] if step == 0 else [1] * (3 - step % 2)
        count = 4 if on_lane and step else sum(lengths)
        drawn = torch.randn(2, count, 8, 64, generator=random).half().to(DEVICE)
        results = []
        for resource in (plain, fused):
            monkeypatch.setattr(triton_decode, "ROWS", 16 if resource is fused else 0)
            rows = [Row(owner, n) for owner, n in zip(owners[id(resource)], lengths, strict=False)]
            stage = resource.context.stage
            stage.begin(lane if on_lane and step and resource is fused else None)
            view = resource.plan(rows)
            before = len(paged.plans)
            stage.send()
            mine = drawn if resource is fused else drawn[:, : sum(lengths)].contiguous()
            results.append(attend(resource, view, mine, norms))
            if resource is fused and step:
                assert len(used) == 2 * step
                assert len(paged.plans) == before  # FlashInfer plans nothing for it
                views.add(id(view))
            resource.commit(rows)
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got[: len(wanted)].float(), wanted.float(), rtol=4e-3, atol=4e-3)
    assert len(views) == 1 or not on_lane


def test_a_step_that_is_not_for_the_kernel_is_flashinfers(paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resource, heads = paged(), torch.zeros(2, 8, 64, dtype=torch.float16, device=DEVICE)
    backend, memory, stage = resource.backend, resource.memory, resource.context.stage
    rotation = Rotation(*(torch.zeros(2, 1, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)))
    places, tables = torch.zeros(2, dtype=torch.int64, device=DEVICE), np.arange(4, dtype=np.int32).reshape(2, 2)

    def ask(lengths: list[int], of: KVMemory = memory, window: int | None = None, **fields: Any) -> Tensor | None:
        stage.begin()
        batch = KVBatch(np.asarray(lengths), np.asarray([3, 9]), tables, 16, **fields)
        plan = backend.plan_kv(of, batch, stage, "kv")
        stage.send()
        mixed: Tensor | None = plan.attend_heads(0, heads, 4, rotation, None, places, window=window)
        return mixed

    assert ask([1, 1]) is not None
    assert ask([1, 2]) is None
    assert ask([1, 1], step_kv="none") is None
    assert ask([1, 1], step_kv="beside") is None
    assert ask([1, 1], sink=2, window=4) is None
    assert ask([1, 1], KVMemory(1, 64, 2, 80, torch.float16, DEVICE)) is None
    monkeypatch.setattr(triton_decode, "ROWS", 1)
    assert ask([1, 1]) is None
    wide = KVMemory(1, 64, 1, 256, torch.float16, DEVICE)
    few = backend.few
    batch = KVBatch(np.asarray([1, 1]), np.asarray([3, 9]), tables, 16)
    assert few.plan(wide, batch, 16, (places, places, places)) is not None  # it has a limit of its own
    monkeypatch.setattr(triton_decode, "WIDE_ROWS", 1)
    assert few.plan(wide, batch, 16, (places, places, places)) is None
    monkeypatch.setattr(triton_decode, "ROWS", 2)
    heads = torch.zeros(3, 8, 64, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="planned for 2"):
        ask([1, 1])


def test_without_a_gpu_or_triton_nothing_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_decode._kernels(torch.device("cpu")) is None
    monkeypatch.setattr(triton_decode.ops, "cuda_kernels_fault", lambda: "triton cannot be imported")
    assert triton_decode._kernels(torch.device("cuda")) is None
