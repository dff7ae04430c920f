"""The rules' Triton kernels against plain torch.

Run by ``test_whisper_rules_cuda.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this
file runs them there.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.nn.ops.delta import StateSlots
from mstar_asr.whisper import rules_cuda
from mstar_asr.whisper.rules import FACTS, Rules

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# numpy, which interprets the kernels, warns where a GPU computes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EOT, BEGIN = 40, 47
LENGTH = 10


def tokens(vocab: int) -> Any:
    return SimpleNamespace(
        timestamp_begin=BEGIN, eot=EOT, no_timestamps=BEGIN - 1, suppressed=(1, 7, EOT + 2), suppressed_first=(3,)
    )


def expected(rules: Rules, logits: Tensor, facts: Tensor) -> Tensor:
    """What plain torch makes of them, on the CPU."""
    plain = Rules(rules.tokens)
    changed = logits.cpu().clone()
    plain.next(changed, facts.cpu())
    return changed


def run(rules: Rules, logits: Tensor, facts: Tensor) -> Tensor:
    changed = logits.clone()
    rules_cuda.following(changed, facts, rules.never.to(DEVICE), BEGIN, EOT, BEGIN - 1)
    return changed.cpu()


@pytest.mark.parametrize("vocab", [BEGIN + 60, BEGIN + 9000])  # one block, several
@pytest.mark.parametrize("boost", [0.0, 3.0, 9.0])
def test_what_may_follow(vocab: int, boost: float) -> None:
    """All facts that an answer can have, each beside others. *boost* makes text likelier."""
    rules, draw = Rules(tokens(vocab)), torch.Generator().manual_seed(3)
    rows = [
        (wanted, 4, last, before, latest)
        for wanted in (0, 1)
        for last in (0, 1)
        for before in (0, 1)
        for latest in (0, BEGIN, BEGIN + 17, vocab - 1)
    ]
    facts = torch.tensor(rows).to(DEVICE)
    logits = torch.randn(len(rows), vocab, generator=draw)
    logits[:, :EOT] += boost
    logits = logits.to(DEVICE)
    got, wanted = run(rules, logits, facts), expected(rules, logits, facts)
    assert torch.equal(got, wanted)
    timed = wanted[:, :EOT].isinf().all(1)
    assert timed.any()
    assert not timed.all()


def test_numbers_that_are_none_stay() -> None:
    """In one row among others; the sampler finds them."""
    rules, vocab = Rules(tokens(BEGIN + 60)), BEGIN + 60
    facts = torch.tensor([[1, 4, 0, 0, BEGIN + 3]] * 4).to(DEVICE)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(8))
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[2, BEGIN + 30] = torch.nan
    got, wanted = run(rules, logits.to(DEVICE), facts), expected(rules, logits, facts)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0), wanted.nan_to_num(0))


def test_no_row_at_all() -> None:
    rules_cuda.following(torch.zeros(0, 60, device=DEVICE), torch.zeros(0, FACTS, device=DEVICE).long(), *_rest())


def _rest() -> tuple[Tensor, int, int, int]:
    return torch.zeros(0, dtype=torch.int64, device=DEVICE), BEGIN, EOT, BEGIN - 1


def test_what_was_sampled_is_noted() -> None:
    rules = Rules(tokens(0))
    facts = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 3, 1, 0, BEGIN], [0, LENGTH - 1, 0, 1, BEGIN + 2], [1, LENGTH + 5, 1, 1, 0]]
    ).to(DEVICE)
    ids = torch.tensor([BEGIN + 4, 5, 6, BEGIN]).to(DEVICE)
    said, noted = torch.arange(9 * LENGTH).reshape(9, LENGTH).to(DEVICE), torch.full((9, FACTS), -7).to(DEVICE)
    source, target = torch.tensor([8, 0, 3, 2]).to(DEVICE), torch.tensor([1, 4, 7, 5]).to(DEVICE)
    other = torch.tensor([0, 6, 2, 8]).to(DEVICE)
    before = said.clone()
    rules_cuda.note(ids, facts, StateSlots(said, source, target), StateSlots(noted, source, other), BEGIN)
    assert torch.equal(noted[other].cpu(), rules.after(facts.cpu(), ids.cpu()))
    place = facts[:, 1].clamp(max=LENGTH - 1)
    assert torch.equal(said[target], before[source].scatter(1, place[:, None], ids[:, None]))
    untouched = [row for row in range(9) if row not in target.tolist()]
    assert torch.equal(said[untouched], before[untouched])
