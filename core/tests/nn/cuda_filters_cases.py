"""The threshold of top-k, top-p and min-p against a sort, where samples mislead and buffers overflow. Run as
``cuda_ops_cases.py`` is."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.nn.ops import cuda_filters, cuda_sampling
from mstar.resources.sampler_rows import SlotTable
from mstar.spec.request import SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCAB = 9000  # three blocks, the last one short; a sample sees less than half of it
NEAR = 1e-6  # of the distribution: what float32's sums may be off

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**values)


def filtered(scores: Tensor, *chosen: SamplingParams) -> cuda_filters.Filtered:
    slots = SlotTable(len(chosen), torch.device(DEVICE))
    for slot, each in enumerate(chosen):
        slots.set(slot, each)
    scores, index = scores.to(DEVICE), torch.arange(len(chosen), device=DEVICE)
    known = cuda_sampling.summarise(scores, index, slots.floats)
    found = cuda_filters.apply_filters(
        scores, index, slots.floats, slots.top_k, known.tops, known.sums, known.block, known.warps
    )
    return cuda_filters.Filtered(*(each.cpu() for each in found))


def kept(scores: Tensor, chosen: SamplingParams, slack: float) -> tuple[int, Tensor]:
    """How many tokens of one row's *scores* stay by a sort in float64, had the sum been *slack* more; their weights."""
    x = scores.float() * torch.tensor(1 / chosen.temperature)
    order = x.sort(descending=True).values
    weights = (order.double() - order[0]).exp()
    least = order[min(chosen.top_k, len(x)) - 1].item() if chosen.top_k else -torch.inf
    if chosen.top_p < 1:
        weights = weights * (order >= least)
        above = weights.cumsum(0) - weights
        count = int((above < (chosen.top_p + slack) * weights.sum()).sum())
        least = max(least, order[max(count, 1) - 1].item())
    if chosen.min_p > 0:
        least = max(least, (order[0] + torch.tensor(chosen.min_p).log()).item())
    return int((x >= least).sum()), (x.double() - order[0]).exp() * (x >= least)


def check(scores: Tensor, *chosen: SamplingParams) -> cuda_filters.Filtered:
    """Thresholds and blocks' weights are those of the sort."""
    got = filtered(scores, *chosen)
    for row, each in enumerate(chosen):
        x = scores[row].float() * torch.tensor(1 / each.temperature)
        mine = x >= got.thresholds[row]
        (least, _), (most, _) = kept(scores[row], each, -NEAR), kept(scores[row], each, NEAR)
        assert least <= int(mine.sum()) <= most, (row, each)
        weights = (x.double() - x.max()).exp() * mine
        blocks = torch.nn.functional.pad(weights, (0, -len(x) % 4096)).view(-1, min(4096, len(x))).sum(1)
        torch.testing.assert_close(got.weights[row].double(), blocks, rtol=1e-5, atol=1e-6 * blocks.sum().item())
    return got


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


SEVERAL = [
    params(top_k=1),
    params(top_k=300, temperature=0.5),
    params(top_k=VOCAB - 1),
    params(top_p=1e-7),
    params(top_p=0.6, temperature=1.5),
    params(top_p=0.9999999),
    params(min_p=0.2),
    params(top_k=40, min_p=0.3),
    params(top_k=40, min_p=1e-9),
    params(top_p=0.9, min_p=0.5),
    params(top_p=0.9, min_p=1e-3),
    params(top_k=2000, top_p=0.7),
    params(top_k=2000, top_p=0.7, min_p=0.9),
]


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_brackets_hold_the_threshold(scale: float) -> None:
    """Of flat rows and of peaked ones, without a look at all logits."""
    chosen = SEVERAL if not INTERPRETED or scale > 1 else SEVERAL[4::4]
    got = check(drawn(1, VOCAB, scale=scale).expand(len(chosen), -1), *chosen)
    assert (got.found >= 0).all()


@pytest.mark.parametrize("seen", ["least", "best"])
def test_a_sample_that_misleads_changes_nothing(seen: str) -> None:
    """Every second piece of eight tokens is in the sample of this vocabulary."""
    scores = drawn(4, 8192)
    sampled = torch.arange(8192) // 8 % 2 == 0
    scores[:, sampled] += -30.0 if seen == "least" else 30.0
    got = check(scores, params(top_p=0.5), params(top_p=0.99), params(top_k=4500), params(top_k=3000, top_p=0.5))
    assert -1 in got.found.tolist()


def test_more_equal_scores_than_the_buffer_holds() -> None:
    scores = torch.full((3, cuda_filters.ROOM.value + 4000), -2.5)
    scores[1:, 77] = 9.0
    scores[2, 400:1400] = -1.0
    chosen = params(top_k=5), params(top_p=0.99), params(top_k=500, top_p=0.9999)
    got = check(scores, *chosen)
    assert got.found[:2].tolist() == [-1, -1]
    assert [int((scores[row] >= got.thresholds[row]).sum()) for row in range(3)] == [20384, 20384, 1001]


def test_ties_at_the_threshold_stay_together() -> None:
    scores = (drawn(1, VOCAB, scale=2.0) * 2).round().div(2).expand(3, -1)
    for dtype in (torch.bfloat16, torch.float32):
        check(scores.to(dtype), params(top_k=100), params(top_p=0.8), params(top_k=1000, top_p=0.8, temperature=0.7))


def test_one_token_that_weighs_nearly_all() -> None:
    scores = drawn(3, VOCAB, scale=0.1)
    scores[:, 5000] = 25.0
    scores[2, 5000] = torch.tensor(float(VOCAB)).log()  # half of it
    got = check(scores, params(top_p=0.99), params(top_k=3), params(top_p=0.9))
    assert int((scores[0] >= got.thresholds[0]).sum()) == 1


def test_impossible_tokens_count_for_nothing() -> None:
    scores = torch.full((5, VOCAB), -torch.inf)
    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:600]
    scores[:, some] = drawn(5, 600)
    scores[4, 1:] = -torch.inf
    scores[4, 0] = 1.0
    chosen = params(top_k=20), params(top_k=601), params(top_p=0.95), params(top_k=500, top_p=0.5), params(top_p=0.5)
    got = check(scores, *chosen)
    assert got.thresholds[1] == -torch.inf
    assert got.thresholds[4] == 1


def test_scores_far_from_zero_and_about_it() -> None:
    """As keys, numbers about zero are far apart, and large ones near."""
    scores = torch.cat((drawn(1, VOCAB, scale=1e-6), drawn(1, VOCAB) - 4e4, drawn(1, VOCAB) * 1e30))
    check(scores, params(top_p=0.7), params(top_p=0.7), params(top_k=7))


def test_what_is_found_does_not_depend_on_the_batch() -> None:
    chosen = [params(top_p=0.9), params(), params(top_k=30, top_p=0.9), params(temperature=0.0, top_p=0.1)]
    scores = drawn(4, VOCAB, scale=2.0)
    together = filtered(scores, *chosen)
    for row in (0, 2):
        alone = filtered(scores[row : row + 1], chosen[row])
        assert torch.equal(alone.thresholds[0], together.thresholds[row])
        assert torch.equal(alone.weights[0], together.weights[row])
    again = filtered(scores, *chosen)
    assert torch.equal(again.weights[::2], together.weights[::2])
