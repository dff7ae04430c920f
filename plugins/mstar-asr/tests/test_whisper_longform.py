"""The rules of long clips, against transformers' where they are the same, and case by case where they are not."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from mstar_asr.whisper.longform import (
    Answer,
    History,
    Piece,
    Thresholds,
    compression_ratio,
    cut,
    frames_of,
    is_silence,
    needs_fallback,
    temperatures,
)

BEGIN = 100  # timestamps are 100, 101…; text is below


def stamped(*parts: int | float) -> list[int]:
    """Whole numbers are text tokens, floats are seconds."""
    return [BEGIN + round(part / 0.02) if isinstance(part, float) else part for part in parts]


@pytest.mark.parametrize(
    ("tokens", "frames", "pieces", "seek", "whole"),
    [
        # two segments, and the third one that the window's end cuts off
        ((0.0, 1, 2, 1.0, 1.0, 3, 4.0, 4.0, 5), 3000, [(0, 100, 4), (100, 400, 3)], 400, False),
        # a pause between two segments
        ((0.0, 1, 1.0, 2.5, 3, 4.0, 4.0), 3000, [(0, 100, 3), (250, 400, 3)], 400, False),
        # a single timestamp at the end: nobody speaks after it
        ((0.0, 1, 1.0, 1.0, 2, 9.0), 3000, [(0, 100, 3), (100, 900, 3)], 3000, True),
        # no pair: one segment to the last timestamp; it begins where the window does
        ((0.4, 1, 2, 9.0), 3000, [(0, 900, 4)], 3000, True),
        ((0.0, 1, 2), 1100, [(0, 1100, 3)], 1100, False),
        ((1, 2), 777, [(0, 777, 2)], 777, False),
        ((), 777, [(0, 777, 0)], 777, False),
    ],
)
def test_an_answer_in_segments(
    tokens: tuple[int | float, ...], frames: int, pieces: list[tuple[int, int, int]], seek: int, whole: bool
) -> None:
    found = cut(stamped(*tokens), BEGIN, frames)
    assert [(p.start, p.end, len(p.tokens)) for p in found.pieces] == pieces
    assert (found.seek, found.whole) == (seek, whole)


def test_what_is_unfinished_can_be_a_segment_too() -> None:
    tokens = stamped(0.0, 1, 1.0, 1.0, 2, 3)
    found = cut(tokens, BEGIN, 500, rest=True)
    assert found.pieces == (Piece(0, 100, tuple(tokens[:3])), Piece(100, 500, tuple(tokens[3:])))
    assert cut(tokens[:3], BEGIN, 500, rest=True) == cut(tokens[:3], BEGIN, 500)


def legal(rng: random.Random) -> list[int]:
    """An answer that the timestamp rules allow."""
    at = rng.randint(0, 50)
    tokens = [BEGIN + at]
    while True:
        tokens += [rng.randint(0, 90) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.15:
            return tokens
        at = min(1500, at + rng.randint(1, 400))
        tokens.append(BEGIN + at)
        if rng.random() < 0.2:
            return tokens
        at = min(1500, at + rng.choice([0, 0, rng.randint(0, 60)]))
        tokens.append(BEGIN + at)
        if rng.random() < 0.2 or at == 1500:
            return tokens


def test_segments_are_those_of_transformers() -> None:
    rng = random.Random(4)
    for _ in range(500):
        tokens, frames = legal(rng), rng.choice([3000, 3000, rng.randrange(2, 3000, 2)])
        expected, seek = WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=[{}],
            time_offset=torch.zeros(1, dtype=torch.float64),
            timestamp_begin=BEGIN,
            seek_num_frames=torch.tensor([frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )
        found = cut(tokens, BEGIN, frames)
        assert found.seek == int(seek)
        assert [p.start / 100 for p in found.pieces] == pytest.approx([float(s["start"]) for s in expected])
        assert [p.end / 100 for p in found.pieces] == pytest.approx([float(s["end"]) for s in expected])
        said = [token for piece in found.pieces for token in piece.tokens]
        # it keeps the second timestamp of a pair at the end
        assert said == [int(t) for s in expected for t in s["tokens"]][: len(said)]


THRESHOLDS = Thresholds(2.4, -1.0, 0.6)


@pytest.mark.parametrize(
    ("logprob", "silence", "ratio", "again", "silent"),
    [
        (-0.3, 0.1, 1.2, False, False),
        (-0.3, 0.1, 2.5, True, False),  # repeats itself
        (-1.2, 0.1, 1.2, True, False),  # guessed
        (-1.2, 0.7, 1.2, False, True),  # guessed at silence
        (-1.2, 0.7, 2.5, False, True),
        (-0.3, 0.7, 1.2, False, False),  # sure of itself
        (-0.3, 0.7, 2.5, True, False),
        (-1.2, float("nan"), 1.2, True, False),  # a vocabulary without silence
    ],
)
def test_judging_an_answer(logprob: float, silence: float, ratio: float, again: bool, silent: bool) -> None:
    answer = Answer((1, 2), logprob, silence, ratio)
    assert (needs_fallback(answer, THRESHOLDS), is_silence(answer, THRESHOLDS)) == (again, silent)


def test_repetition_compresses_well() -> None:
    assert compression_ratio("la " * 80) > 2.4 > compression_ratio("The quick brown fox jumps over the lazy dog.")


@pytest.mark.parametrize(
    ("first", "step", "tried"),
    [
        (0.0, 0.2, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.4, 0.2, (0.4, 0.6, 0.8, 1.0)),
        (0.5, 0.3, (0.5, 0.8)),
        (0.3, 0.0, (0.3,)),
        (1.0, 0.2, (1.0,)),
    ],
)
def test_temperatures(first: float, step: float, tried: tuple[float, ...]) -> None:
    assert temperatures(first, step) == tried


def test_context_of_the_next_window() -> None:
    history = History((7, 8))
    assert history.after((1, 2), 0.4, True).tokens == (7, 8, 1, 2)
    assert history.after((1, 2), 0.6, True).tokens == ()
    assert history.after((1, 2), 0.0, False).tokens == ()


def test_a_clips_frames() -> None:
    assert [frames_of(samples) for samples in (0, 159, 160, 176_000)] == [0, 0, 1, 1100]
