"""The rules of an answer, against the logits processors of transformers, over made-up answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mstar_asr.whisper.rules import Rules
from mstar_asr.whisper.tokens import WhisperTokens

STEPS = 60


@pytest.fixture(scope="module")
def tokens(tiny_folder: Path) -> WhisperTokens:
    return WhisperTokens.read(tiny_folder)


def processors(tokens: WhisperTokens, begin: int, max_initial: int | None) -> list:
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = SimpleNamespace(
        no_timestamps_token_id=tokens.no_timestamps,
        eos_token_id=tokens.eot,
        bos_token_id=tokens.eot,
        max_initial_timestamp_index=max_initial,
        _detect_timestamp_from_logprob=True,
    )
    return [
        SuppressTokensLogitsProcessor(list(tokens.suppressed)),
        SuppressTokensAtBeginLogitsProcessor(list(tokens.suppressed_first), begin),
        WhisperTimeStampLogitsProcessor(config, begin_index=begin),
    ]


@pytest.mark.parametrize("max_initial", [50, 0, None])
@pytest.mark.parametrize("boost", [0.0, 3.0, 7.0])
def test_timestamps(tokens: WhisperTokens, max_initial: int | None, boost: float) -> None:
    """*boost* makes text likelier, so that text and timestamps take turns."""
    rules, draw = Rules(tokens), torch.Generator().manual_seed(11)
    prompt = [tokens.sot, tokens.languages["en"], tokens.transcribe]
    wanted_rules = processors(tokens, len(prompt), max_initial)
    vocab, rows = tokens.timestamp_begin + 1501, 4
    answers, facts = [list(prompt) for _ in range(rows)], None
    limit = torch.full((rows,), -1 if max_initial is None else max_initial)
    for step in range(STEPS):
        logits = torch.randn(rows, vocab, generator=draw)
        logits[:, : tokens.eot] += boost
        logits[:, tokens.eot] -= 4  # so that answers go on
        wanted = logits.clone()
        for rule in wanted_rules:
            wanted = rule(torch.tensor(answers), wanted)
        if facts is None:
            facts = rules.first(logits, torch.ones(rows, dtype=torch.bool), limit)
        else:
            rules.next(logits, facts)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=0, msg=f"step {step}")
        ids = logits.softmax(1).multinomial(1, generator=draw)[:, 0]
        facts = rules.after(facts, ids)
        for answer, token in zip(answers, ids.tolist(), strict=True):
            answer.append(token)
    times = sum(token >= tokens.timestamp_begin for answer in answers for token in answer)
    assert times < rows * STEPS or not boost  # there was text between them


def test_rows_with_and_without_timestamps_do_not_mix(tokens: WhisperTokens) -> None:
    rules, draw = Rules(tokens), torch.Generator().manual_seed(5)
    wanted, limit = torch.tensor([True, False]), torch.tensor([50, 50])
    logits = torch.randn(2, tokens.timestamp_begin + 1501, generator=draw)
    plain = logits[1].clone()
    facts = rules.first(logits, wanted, limit)
    never = [*tokens.suppressed, *tokens.suppressed_first]
    plain[never] = -torch.inf
    assert torch.equal(logits[1], plain)
    assert logits[0, : tokens.timestamp_begin].isinf().all()
    facts = rules.after(facts, torch.tensor([tokens.timestamp_begin + 3, tokens.timestamp_begin + 3]))
    logits = torch.randn(2, tokens.timestamp_begin + 1501, generator=draw)
    plain = logits[1].clone()
    rules.next(logits, facts)
    plain[list(tokens.suppressed)] = -torch.inf
    assert torch.equal(logits[1], plain)
    assert logits[0, tokens.timestamp_begin :].isinf().all()
