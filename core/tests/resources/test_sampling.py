"""The maths of sampling against transformers' logits processors and against the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mstar.nn import sampling

VOCAB = 1300  # more than two blocks, the last one short


def logits(rows: int, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(7)) * scale


def kept(scores: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return scores >= threshold.unsqueeze(1)


@pytest.mark.parametrize("k", [1, 5, 400, VOCAB])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    scores = logits(4)
    threshold = sampling.filter_threshold(scores, torch.full((4,), k), None, k)
    reference = TopKLogitsWarper(k)(torch.LongTensor(4, 0), scores)
    assert torch.equal(kept(scores, threshold), reference > -torch.inf)


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(p: float, scale: float) -> None:
    """A flat distribution (0.1) needs the full sort, a steep one (6.0) only the head."""
    scores = logits(6, scale=scale)
    threshold = sampling.filter_threshold(scores, torch.zeros(6, dtype=torch.int64), torch.full((6,), p), 0)
    reference = TopPLogitsWarper(p)(torch.LongTensor(6, 0), scores)
    assert torch.equal(kept(scores, threshold), reference > -torch.inf)


def test_top_k_then_top_p_renormalises_in_between() -> None:
    scores = logits(5, scale=1.0)
    threshold = sampling.filter_threshold(scores, torch.full((5,), 40), torch.full((5,), 0.7), 40)
    ids = torch.zeros(5, 0, dtype=torch.int64)
    reference = TopPLogitsWarper(0.7)(ids, TopKLogitsWarper(40)(ids, scores))
    assert torch.equal(kept(scores, threshold), reference > -torch.inf)
    alone = sampling.filter_threshold(scores, torch.zeros(5, dtype=torch.int64), torch.full((5,), 0.7), 0)
    assert (kept(scores, alone).sum(-1) > kept(scores, threshold).sum(-1)).all()


def test_rows_are_filtered_each_by_its_own_values() -> None:
    scores = logits(4, scale=0.3)
    top_k, top_p = torch.tensor([3, 0, 50, 0]), torch.tensor([1.0, 0.95, 0.4, 1.0])
    together = sampling.filter_threshold(scores, top_k, top_p, 50)
    for row in range(4):
        k = int(top_k[row])
        alone = sampling.filter_threshold(scores[row : row + 1], top_k[row : row + 1], top_p[row : row + 1], k)
        assert torch.equal(alone, together[row : row + 1])
    assert kept(scores, together)[3].all()


def test_ties_with_the_last_token_kept_are_kept() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    threshold = sampling.filter_threshold(scores, torch.tensor([2]), None, 2)
    assert kept(scores, threshold).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    scores = logits(4)
    threshold = sampling.min_p_threshold(scores.amax(-1), torch.full((4,), p))
    reference = MinPLogitsWarper(p)(torch.LongTensor(4, 0), torch.FloatTensor(scores))
    assert torch.equal(kept(scores, threshold), reference > -torch.inf)


def test_repetition_penalty_equals_transformers() -> None:
    scores = logits(3)
    ids = torch.tensor([[1, 2, 2, 9], [0, 0, 0, 0], [1299, 5, 6, 7]])
    seen = torch.zeros(3, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
    ours = sampling.penalize_repetition(scores, seen, torch.full((3,), 1.3))
    torch.testing.assert_close(ours, RepetitionPenaltyLogitsProcessor(1.3)(ids, scores.clone()), rtol=0, atol=0)


def test_count_penalties_follow_the_definition() -> None:
    scores = logits(2, 6)
    counts = torch.tensor([[0, 1, 3, 0, 0, 0], [2, 0, 0, 0, 0, 1]], dtype=torch.int32)
    ours = sampling.penalize_counts(scores, counts, torch.tensor([0.5, -1.0]), torch.tensor([0.25, 2.0]))
    for row, (frequency, presence) in enumerate([(0.5, 0.25), (-1.0, 2.0)]):
        for token in range(6):
            n = int(counts[row, token])
            expected = float(scores[row, token]) - frequency * n - (presence if n else 0.0)
            assert float(ours[row, token]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("vocab", [3, 512, 1024, 1300, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_the_largest(vocab: int, dtype: torch.dtype) -> None:
    scores = logits(16, vocab, scale=0.5).to(dtype)
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert sampling.argmax(scores).tolist() == expected


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Distance in standard deviations of the chi-square statistic from its mean."""
    expected = probabilities * counts.sum()
    statistic = float((((counts - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_draws_follow_the_distribution() -> None:
    vocab, draws = 1300, 40_000
    weights = torch.softmax(logits(1, vocab, scale=1.0), -1) * 5.0  # need not be normalised
    numbers = sampling.uniforms(np.full(draws, sampling.stream_key(3), dtype=np.uint64), np.arange(draws))
    counts = np.zeros(vocab)
    for part in np.array_split(numbers, 20):
        ids = sampling.draw(weights.expand(len(part), -1), torch.from_numpy(part))
        counts += np.bincount(ids.numpy(), minlength=vocab)
    probabilities = (weights / weights.sum()).double().numpy()[0]
    order = np.argsort(-probabilities)
    groups = np.array_split(order, 60)  # enough expected draws in each
    grouped = np.array([counts[g].sum() for g in groups])
    assert abs(chi_square(grouped, np.array([probabilities[g].sum() for g in groups]))) < 4


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    weights = torch.rand(1, VOCAB, generator=torch.Generator().manual_seed(1))
    weights[0, 100:700] = 0  # a whole block and more
    cumulative = weights.double().cumsum(-1) / weights.double().sum()
    inside = (cumulative - weights.double() / weights.double().sum() / 2)[0]  # the middle of every token's interval
    tokens = torch.nonzero(weights[0] > 1e-3).squeeze(1)
    drawn = sampling.draw(weights.expand(len(tokens), -1), inside[tokens])
    assert torch.equal(drawn, tokens)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("token", [0, 511, 512, 700, VOCAB - 1])
def test_impossible_tokens_are_never_drawn(uniform: float, token: int) -> None:
    weights = torch.zeros(2, VOCAB)
    weights[0, token] = 0.3
    weights[1, token] = 1e-30
    assert sampling.draw(weights, torch.full((2,), uniform, dtype=torch.float64)).tolist() == [token, token]


def test_uniforms_are_the_splitmix64_sequence() -> None:
    """Reference values: the first outputs for seed 1234567 that the algorithm's published tests use."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = sampling.uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4))
    assert numbers.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_streams_are_independent() -> None:
    keys = np.array([sampling.stream_key(seed, "sampler", "main") for seed in range(-100, 100)], dtype=np.uint64)
    table = sampling.uniforms(keys[:, None], np.arange(50)[None, :])
    assert len(np.unique(table)) == table.size
    assert table.min() >= 0
    assert table.max() < 1
    assert abs(np.corrcoef(table)[np.triu_indices(200, 1)]).mean() < 0.15
    assert sampling.stream_key(1, "a") != sampling.stream_key(1, "b")


def test_temperature_is_that_of_transformers() -> None:
    scores = logits(3)
    reference = torch.softmax(TemperatureLogitsWarper(0.6)(torch.zeros(3, 0, dtype=torch.int64), scores), -1)
    torch.testing.assert_close(torch.softmax(scores * (1 / 0.6), -1), reference)


def test_bitmask_is_lowest_bit_first() -> None:
    words = torch.tensor([[1 | (1 << 3), -(2**31)], [0, 2]], dtype=torch.int32)
    table = sampling.unpack_bitmask(words, 64)
    assert [row.nonzero().squeeze(1).tolist() for row in table] == [[0, 3, 63], [33]]
    assert sampling.unpack_bitmask(words, 40).shape == (2, 40)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    scores = logits(3, 50)
    table = torch.log_softmax(scores, -1)
    tables = sampling.token_logprobs(scores, torch.tensor([4, 5, 6]), 5)
    reports = sampling.as_reports([4, 5, 6], *(table.tolist() for table in tables), [0, 2, 5])
    for row, (report, n) in enumerate(zip(reports, [0, 2, 5], strict=True)):
        assert report.token == 4 + row
        assert report.logprob == pytest.approx(float(table[row, 4 + row]))
        best = table[row].topk(max(n, 1))
        assert [t for t, _ in report.top] == best.indices.tolist()[:n]
        assert [p for _, p in report.top] == pytest.approx(best.values.tolist()[:n])
