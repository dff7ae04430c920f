"""Pictures and videos on a GPU: captured steps say what plain ones say, and float32 what the CPU says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.registry import Registry
from mstar.spec.tasks import Image, Part, Video
from mstar.testing.drive import Driver
from mstar.testing.examples import Example

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ROUNDS = 4
"""A step of pictures is captured when it has come twice."""


def parts(seed: int) -> tuple[Part, ...]:
    """Of more and more pieces: the last has more than a captured step of few has."""
    draw = np.random.default_rng(seed)
    pictures = [Image(draw.integers(0, 256, (16 + 8 * i, 40, 3), dtype=np.uint8)) for i in range(seed + 1)]
    clip = Video(draw.integers(0, 256, (8 * seed + 2, 16, 24, 3), dtype=np.uint8), 4.0)
    return (*pictures, clip) if seed else tuple(pictures)


def driven(qwen3: Registry, folder: Path, device: str, dtype: str, runner: str | None) -> Driver:
    return Driver(
        "qwen3_5_2b",
        qwen3,
        weights=folder,
        device=device,
        dtype=dtype,
        max_concurrent_requests=4,
        resources={"kv": {"tokens": 8192, "prefix_cache": False}, "media": {"cache": False}},
        engine={"runner": runner},
    )


def answers(driver: Driver, turn: int) -> list[Any]:
    names = [f"{turn}-{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        driver.submit(name, Example("What?", {"max_tokens": 4, "temperature": 0.0}, parts=parts(seed)))
    driver.run()
    return [driver.result(name)["text"] for name in names]


def test_captured_steps_say_what_plain_steps_say(qwen3: Registry, folders: dict[str, Path]) -> None:
    plain = driven(qwen3, folders["whole"], "cuda", "bfloat16", "eager")
    captured = driven(qwen3, folders["whole"], "cuda", "bfloat16", None)
    wanted = answers(plain, 0)
    rounds = [answers(captured, turn) for turn in range(ROUNDS)]
    runner: Any = captured.worker.engine.runner
    assert not runner.faults
    assert ("encoder", "forward") in {key[:2] for key in runner._lanes}
    assert rounds[1:] == [rounds[1]] * (ROUNDS - 1)  # the first one's steps were not captured yet
    for answer in rounds[:2]:
        same = sum(a == b for got, want in zip(answer, wanted, strict=True) for a, b in zip(got, want, strict=True))
        assert same >= 12  # of 16: padded products may round otherwise
    captured.assert_empty()


def test_float32_says_what_the_cpu_says(qwen3: Registry, folders: dict[str, Path]) -> None:
    there, here = (driven(qwen3, folders["whole"], device, "float32", "eager") for device in ("cuda", "cpu"))
    assert answers(there, 0) == answers(here, 0)
