"""Whisper on a GPU: the same words as on the CPU, in captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing import ROUNDING, Ears, Reference, clip

from mstar.spec.request import EngineRequest
from mstar_asr.whisper.request import DETECT
from mstar_asr.whisper.tiny import write

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ROUNDS = 7
"""Steps outside of loops are captured when they have come six times."""


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as all published sizes have: attention on a GPU wants that."""
    folder = tmp_path_factory.mktemp("whisper-wide")
    write(folder, hidden=128, heads=2)
    return folder


def sound(number: int) -> np.ndarray:
    return clip(2.0 + number, seed=number)


def asked(ears: Ears, name: str) -> list[EngineRequest]:
    return [
        ears.request(
            f"{name}{number}",
            sound(number),
            how={"timestamps": bool(number % 2), "language": "en" if number % 3 else None},
            max_tokens=14,
            words=number == 1,
        )
        for number in range(4)
    ]


def hear(ears: Ears, name: str) -> list[dict[str, Any]]:
    return ears.hear(*asked(ears, name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_captured_steps_say_what_the_cpu_says(wide_folder: Path, dtype: str) -> None:
    ears = Ears(wide_folder, device="cuda", dtype=dtype)
    rounds = [hear(ears, f"{number}-") for number in range(ROUNDS)]
    runner: Any = ears.worker.engine.runner
    assert not runner.faults
    captured = {(key[0], key[1]) for key in runner._lanes}
    assert ("encoder", "forward") in captured
    if dtype != "float32":  # for which there is no paged attention that can be captured
        assert ("decoder", "forward") in captured
    if dtype == "float32":
        for other in rounds[1:]:
            assert [one["text"] for one in other] == [one["text"] for one in rounds[0]]
        for got, wanted in zip(rounds[-1], hear(Ears(wide_folder), "cpu"), strict=True):
            assert got["text"] == wanted["text"]
            np.testing.assert_allclose(got["no_speech"], wanted["no_speech"], rtol=1e-2)
        return
    # Captured steps and plain calls round differently: which of two tokens that are as likely comes may differ.
    reference, requests = Reference(wide_folder), asked(ears, "again")
    for answers in rounds:
        for request, seed, got in zip(requests, range(len(answers)), answers, strict=True):
            prompt = request.inputs["prompt"].tolist()
            if "language" in got:
                prompt[prompt.index(DETECT)] = int(got["language"].flat[0])
            doubts = reference.doubts(sound(seed), prompt, got["text"], getattr(torch, dtype))
            assert doubts.max() < ROUNDING, (seed, got["text"], doubts)
