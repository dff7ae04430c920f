"""Sampling defaults that stand in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mstar.processing.sampling_defaults import checkpoint_defaults, with_defaults
from mstar.spec.errors import SetupError
from mstar.spec.knobs import SamplingKnobs


class Warm(SamplingKnobs):
    temperature: float = 0.6


def write(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_a_request_wins_over_the_checkpoint_and_that_over_the_family(tmp_path: Path) -> None:
    found = checkpoint_defaults(write(tmp_path, do_sample=True, temperature=1, top_k=20, top_p=None, eos_token_id=3))
    assert found == {"temperature": 1, "top_k": 20}
    knobs = with_defaults(Warm(top_k=5), found)
    assert (knobs.temperature, knobs.top_k, knobs.top_p) == (1, 5, 1.0)
    assert with_defaults(Warm(temperature=0.6), found).temperature == 0.6  # named, though it is the family's default


def test_a_greedy_checkpoint(tmp_path: Path) -> None:
    found = checkpoint_defaults(write(tmp_path, do_sample=False, temperature=0.7))
    assert with_defaults(Warm(), found).temperature == 0
    assert with_defaults(Warm(temperature=1.0), found).temperature == 1


def test_without_a_file_and_without_a_word_on_sampling_the_family_decides(tmp_path: Path) -> None:
    assert checkpoint_defaults(tmp_path) == {}
    assert checkpoint_defaults(write(tmp_path, eos_token_id=[1, 2])) == {}


def test_a_value_out_of_bounds_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"generation_config\.json: .*top_p"):
        checkpoint_defaults(write(tmp_path, top_p=1.5))
