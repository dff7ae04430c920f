"""Sampling in Triton kernels against :mod:`mstar.nn.sampling`. Run as ``cuda_ops_cases.py`` is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mstar.nn import sampling
from mstar.nn.ops import cuda_edits, cuda_filters, cuda_sampling, cuda_sampling_rows
from mstar.resources import sampler_history
from mstar.resources.base import Owner, ResourceContext, Row
from mstar.resources.sampler import SamplerResource
from mstar.resources.sampler_rows import SlotTable
from mstar.resources.staging import Stage
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.resources import Sampler

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 5000  # two blocks, the last one short
ALMOST_ONE = 1 - 2.0**-53

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def table(*params: SamplingParams) -> SlotTable:
    slots = SlotTable(len(params), torch.device(DEVICE))
    for slot, each in enumerate(params):
        slots.set(slot, each)
    return slots


def logits(rows: int, vocab: int = VOCAB, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * scale
    return drawn.to(dtype).to(DEVICE)


def sample(
    scores: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], filters: bool = True
) -> list[int]:
    slots = table(*params)
    index = torch.arange(len(scores), device=DEVICE)
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=DEVICE)
    return list(cuda_sampling.sample(scores, index, slots.floats, slots.top_k, numbers, filters).tolist())


def filtered(scores: Tensor, params: Sequence[SamplingParams]) -> cuda_filters.Filtered:
    slots, index = table(*params), torch.arange(len(scores), device=DEVICE)
    known = cuda_sampling.summarise(scores, index, slots.floats)
    return cuda_filters.apply_filters(
        scores, index, slots.floats, slots.top_k, known.tops, known.sums, known.block, known.warps
    )


def thresholds(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return filtered(scores, params).thresholds


def expected_thresholds(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """By the sort of :func:`mstar.nn.sampling.filter_threshold`, on the CPU."""
    work = scaled(scores, params)
    top_k = torch.tensor([p.top_k for p in params])
    top_p, min_p = (torch.tensor([getattr(p, name) for p in params]) for name in ("top_p", "min_p"))
    found = sampling.filter_threshold(work, top_k, top_p, int(top_k.max()))
    return torch.maximum(found, sampling.min_p_threshold(work.amax(-1), min_p))


def scaled(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    inverse = table(*params).floats[:, SlotTable.INVERSE_TEMPERATURE].cpu()
    return scores.cpu().float() * inverse.unsqueeze(1)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**values)


FILTERS = [
    params(top_k=1),
    params(top_k=50, temperature=0.6),
    params(top_k=VOCAB + 9),
    params(top_p=1e-6),
    params(top_p=0.9, temperature=1.7),
    params(top_p=0.999, temperature=0.3),
    params(min_p=0.07, temperature=0.9),
    params(top_k=40, top_p=0.7),
    params(top_k=700, top_p=0.95, min_p=0.01, temperature=1.3),
]


def test_the_columns_are_those_of_the_slot_table() -> None:
    for name in ("INVERSE_TEMPERATURE", "TOP_P", "MIN_P", "GREEDY"):
        assert getattr(cuda_sampling_rows, name).value == getattr(SlotTable, name)


ROUGH = [(DTYPES[0], 0), (DTYPES[1], 0), (DTYPES[1], 2), (DTYPES[2], 2)]


@pytest.mark.parametrize(("dtype", "steps"), ROUGH if DEVICE == "cuda" else ROUGH[::2])
def test_thresholds_are_those_of_the_sort(dtype: torch.dtype, steps: int) -> None:
    """With *steps* the logits are rounded to halves: hundreds of ties, in which the threshold falls."""
    several = [each for each in FILTERS if each.top_k < VOCAB]  # of others nothing is dropped, and nothing said
    chosen = several if DEVICE == "cuda" or steps else FILTERS[1::3]
    scores = logits(len(chosen), 900 if DEVICE == "cpu" and dtype is torch.float32 else VOCAB, dtype=dtype)
    if steps:
        scores = (scores * steps).round() / steps
    got, want = thresholds(scores, chosen).cpu(), expected_thresholds(scores, chosen)
    work = scaled(scores, chosen)
    assert ((work >= got.unsqueeze(1)) == (work >= want.unsqueeze(1))).all(1).tolist() == [True] * len(chosen)
    # But for min-p, whose threshold lies between tokens, they are the same number.
    by_value = [row for row, each in enumerate(chosen) if not each.min_p]
    assert torch.equal(got[by_value].clamp(work.amin(-1)[by_value]), want[by_value].clamp(work.amin(-1)[by_value]))


def test_zeros_of_both_signs_tie_and_masked_tokens_are_out() -> None:
    scores = torch.full((3, 40), -torch.inf, dtype=torch.float16, device=DEVICE)
    scores[:, 3:9] = torch.tensor([-1.0, 0.0, -0.0, 0.0, -0.0, -2.0])
    chosen = [params(top_k=1), params(top_p=0.2), params(top_k=20, top_p=0.99)]
    got = thresholds(scores, chosen)
    assert (scores >= got.unsqueeze(1)).sum(1).tolist() == [4, 4, 6]
    assert sample(scores.repeat(2, 1), chosen * 2, [0.0] * 3 + [ALMOST_ONE] * 3) == [4, 4, 3, 7, 7, 8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    scores = logits(3, 9000, dtype=dtype)
    scores[0, [4999, 8200, 8999]] = 40.0
    scores[1, [17, 18]] = 40.0
    assert sample(scores, [params(temperature=0.0)] * 3, [0.5] * 3, filters=False)[:2] == [4999, 17]
    assert sample(scores, [params(temperature=0.0, top_k=5)] * 3, [0.5] * 3) == sampling.argmax(scores).tolist()


@pytest.mark.parametrize("filters", [False, True])
def test_rows_that_hold_no_numbers_are_marked(filters: bool) -> None:
    filtered = [params(top_p=0.9), params(top_k=3, top_p=0.5)] if filters else [params()] * 2
    each = [params(temperature=0.0), *filtered, params(), params()]
    scores = logits(5, 80, dtype=torch.bfloat16)
    scores[0, 30], scores[1, 70], scores[2, 5], scores[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    got = sample(scores, each, [0.5] * 5, filters)
    assert got[:4] == [-1] * 4
    assert got[4:] == sample(scores[4:], each[4:], [0.5], filters)
    assert got[4] >= 0


@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else DTYPES[1:2])
def test_tokens_are_those_of_the_cumulative_distribution(dtype: torch.dtype) -> None:
    each = [params(), params(temperature=0.5), *(FILTERS if DEVICE == "cuda" else FILTERS[::2])]
    scores = logits(len(each), 1000, dtype=dtype)
    numbers = np.random.default_rng(3).random(len(each))
    got = torch.tensor(sample(scores, each, numbers.tolist()))
    work = scaled(scores, each).double()
    kept = work >= expected_thresholds(scores, each).double().unsqueeze(1)
    share = (work - work.amax(-1, keepdim=True)).exp() * kept
    until = share.cumsum(-1) / share.sum(-1, keepdim=True)
    high = until.gather(1, got.unsqueeze(1)).squeeze(1)
    low = high - (share / share.sum(-1, keepdim=True)).gather(1, got.unsqueeze(1)).squeeze(1)
    target = torch.from_numpy(numbers)
    assert kept.gather(1, got.unsqueeze(1)).all()
    assert ((low - 1e-6 <= target) & (target <= high + 1e-6)).all()


def test_evenly_spread_numbers_give_every_token_its_share() -> None:
    count = 60 if DEVICE == "cpu" else 4000
    scores = logits(1, 12, scale=1.0).expand(count, 12)
    got = sample(scores, [params()] * count, [(i + 0.5) / count for i in range(count)], filters=False)
    assert got == sorted(got)
    share = scores[0].cpu().double().softmax(-1) * count
    assert (torch.bincount(torch.tensor(got), minlength=12) - share).abs().max() <= 1


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_the_ends_of_the_distribution(uniform: float) -> None:
    scores = logits(2, VOCAB)
    scores[:, :4200] = scores[:, 4900:] = -torch.inf
    scores[1, 4203:] = -torch.inf
    want = [4200, 4200] if uniform == 0 else [4899, 4202]
    assert sample(scores, [params()] * 2, [uniform] * 2, filters=False) == want


@pytest.mark.parametrize("vocab", [6, 151_936])
def test_vocabularies_of_other_sizes(vocab: int) -> None:
    scores, numbers = logits(1, vocab, scale=1.0), torch.tensor([0.3], dtype=torch.float64)
    weights = (scores - scores.amax()).exp().cpu()
    assert sample(scores, [params()], numbers.tolist(), filters=False) == sampling.draw(weights, numbers).tolist()


def test_a_row_is_sampled_alike_alone_and_among_others_and_by_its_slot() -> None:
    each = [params(), params(top_k=5, top_p=0.8), params(temperature=0.0), params(top_p=0.9), params(min_p=0.1)]
    scores, numbers = logits(5, 700, dtype=torch.bfloat16), [0.11, 0.52, 0.3, 0.77, 0.93]
    together = sample(scores, each, numbers)
    for row in range(5) if DEVICE == "cuda" else (1, 3):
        assert sample(scores[row : row + 1], each[row : row + 1], numbers[row : row + 1]) == [together[row]]
    assert sample(scores[:1], each[:1], numbers[:1], filters=False) == together[:1]
    order = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    slots, uniforms = table(*each), torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    wide = torch.empty(5, 710, dtype=torch.bfloat16, device=DEVICE)[:, :700].copy_(scores[order])  # rows have gaps
    got = cuda_sampling.sample(wide, order, slots.floats, slots.top_k, uniforms[order], True)
    assert got.tolist() == [together[i] for i in order.tolist()]
    assert cuda_sampling.sample(wide[:0], order[:0], slots.floats, slots.top_k, uniforms[:0], True).shape == (0,)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "temperature": 1.3},
    {"seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"seed": 7, "allowed_token_ids": (3, 4, 599), "min_tokens": 3, "stop_token_ids": (4,), "top_p": 0.9, "top_k": 2},
    {"seed": 9, "logit_bias": {5: 4.0, 6: 3.5}, "repetition_penalty": 1.2, "top_p": 0.95},
]


@pytest.mark.parametrize("chosen", [MIXED, MIXED[:1], MIXED[:2]])
def test_the_sampler_draws_the_same_tokens_with_it(chosen: list[dict[str, Any]]) -> None:
    drawn = []
    for device, fused in (("cpu", False), (DEVICE, True)):
        context = ResourceContext(torch.device(device), torch.float32, len(chosen), stage=Stage(device))
        resource = SamplerResource("sampler", Sampler(vocab=600), context)
        if fused:
            resource._choosing.fused = cuda_sampling.sample
        owners = [Owner(str(i)) for i in range(len(chosen))]
        for owner, each in zip(owners, chosen, strict=True):
            resource.reserve(owner, 1)
            resource.open(owner, EngineRequest(id=owner.key, sampling={"sampler": SamplingParams(**each)}))
        rows, steps = [Row(owner) for owner in owners], []
        for number in range(2 if len(chosen) < 3 or DEVICE == "cuda" else 1):
            ids = resource.plan(rows).sample(logits(len(chosen) + 7 * number, 600)[: len(chosen)].to(device)).ids
            resource.commit(rows)
            steps.append(ids.tolist())
        drawn.append(steps)
    assert drawn[0] == drawn[1]


@triton.jit
def _store_scores(
    logits, slots, floats, which, words, histories, marks, flags, out,
    columns: tl.constexpr, stride: tl.constexpr, vocab: tl.constexpr, changed: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    edits = (slots, floats, which, words, histories, marks, flags)
    x = cuda_sampling_rows.scores(logits, row, index, edits, 1.0, columns, stride, vocab, block, changed)
    at = index * block + tl.arange(0, block)
    tl.store(out + row * vocab + at, x, mask=at < vocab)


def changes(rows: int) -> tuple[SlotTable, Tensor, sampling.Changes]:
    """Slots and edits of five rows (of which the last *rows* are wanted): with a mask, with penalties, with both and
    with neither. One history is nearly empty."""
    generator = torch.Generator().manual_seed(rows)
    slots = table(
        params(top_p=0.9),
        params(repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.25),
        params(top_k=30),
        params(repetition_penalty=0.8, presence_penalty=-1.0, top_k=500, top_p=0.8),
        params(frequency_penalty=-0.5),
    )
    words = torch.randint(-(2**31), 2**31 - 1, (2, -(-VOCAB // 32)), dtype=torch.int32, generator=generator)
    marks = torch.randint(0, 4, (4, VOCAB), dtype=torch.int32, generator=generator)
    marks += torch.randint(0, 2, marks.shape, dtype=torch.int32, generator=generator) << 30
    marks[0] = 0
    marks[3, torch.arange(VOCAB) % 1000 != 7] = 0
    padded = torch.nn.functional.pad(marks, (0, -VOCAB % sampler_history.GROUP))
    flags = (padded.unflatten(1, (-1, sampler_history.GROUP)) != 0).any(-1).to(torch.uint8)
    which, histories = torch.tensor([2, 0, 1, 2, 0][-rows:]), torch.tensor([0, 3, 0, 1, 0][-rows:])
    index = torch.arange(5)[-rows:].to(DEVICE)
    return slots, index, sampling.Changes(*(each.to(DEVICE) for each in (which, words, histories, marks, flags)))


def expected_edits(scores: Tensor, slots: SlotTable, index: Tensor, edits: sampling.Changes) -> Tensor:
    wanted = scores.cpu().float()
    on_cpu = sampling.Changes(*(None if each is None else each.cpu() for each in edits))  # type: ignore[arg-type]
    sampling.edit(wanted, index.cpu(), slots.floats.cpu(), on_cpu)
    return wanted


def test_groups_are_those_of_the_histories() -> None:
    assert cuda_edits.GROUP.value == sampler_history.GROUP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_edits_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    slots, index, edits = changes(rows)
    scores = logits(rows, dtype=dtype)
    got = torch.full((rows, VOCAB), torch.nan, device=DEVICE)
    pointers, sizes = cuda_sampling_rows.launched(scores, index, slots.floats, edits)
    _store_scores[(rows, 2)](*pointers, got, *sizes, 4096)
    wanted = expected_edits(scores, slots, index, edits)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[-1].cpu(), scores[-1].cpu().float())


def test_tokens_are_chosen_among_edited_scores() -> None:
    """As among scores that were changed before; also by rows whose threshold is looked for among all logits."""
    slots, index, edits = changes(5)
    uniforms = torch.tensor([0.2, 0.9, 0.5, 0.7, 0.1], dtype=torch.float64, device=DEVICE)
    near, far = logits(5, dtype=torch.bfloat16), logits(5, dtype=torch.bfloat16)
    sampled = torch.arange(512) * (VOCAB // 8) // 512
    places = (sampled.unsqueeze(1) * 8 + torch.arange(8)).flatten().to(DEVICE)
    far[:, places] -= 20  # what a sample sees says nothing of the rest
    for scores in (near, far):
        wanted = expected_edits(scores, slots, index, edits).to(DEVICE)
        got = cuda_sampling.sample(scores, index, slots.floats, slots.top_k, uniforms, True, edits)
        plain = cuda_sampling.sample(wanted, index, slots.floats, slots.top_k, uniforms, True)
        assert got.tolist() == plain.tolist()
        assert (got >= 0).all()
        greedy = cuda_sampling.summarise(scores, index, slots.floats, edits)
        assert torch.equal(greedy.tops.amax(1).cpu(), wanted.amax(1).cpu())
