"""Several ranks write down and align what one does."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.nn.mesh import World
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar.testing.ranks import Ranks
from mstar_asr.whisper.tiny import draw, write

CLIPS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    write(folder)  # four heads
    return folder


def registry() -> Registry:
    """With the plugin's module where it is not installed."""
    installed = importlib.metadata.entry_points(group="mstar.plugins", name="asr")
    return Registry(load_plugins(Settings(extra_plugins=() if installed else ("mstar_asr.plugin",))))


def draws() -> dict[str, Example]:
    """Clips by the names of their requests."""
    rng, found = random.Random(5), {}
    for number in range(CLIPS):
        example = draw("whisper_base", rng)
        found[str(number)] = replace(example, knobs={**example.knobs, "temperature": 0.0, "seed": 1, "max_tokens": 9})
    return found


def heard(world: World | None, folder: Path, size: int) -> list[dict[str, Any]]:
    meshes = {}
    if world is not None:
        mesh = world.mesh(range(size), tp=size)
        assert mesh is not None
        meshes = {"encoder": mesh, "decoder": mesh}
    driver = Driver("whisper_base", registry(), folder, meshes)
    for name, example in draws().items():
        prepared = driver.prepare(name, example, ability="transcription", timestamps=("word",))
        driver.submit_prepared(prepared, example)
    driver.run()
    found = [dict(driver.result(str(number))) for number in range(CLIPS)]
    driver.assert_empty()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hear_what_one_hears(ranks: Ranks, folder: Path, tp: int) -> None:
    alone = heard(None, folder, 1)
    assert len({tuple(one["text"]) for one in alone}) == CLIPS, "answers that do not depend on the sound"
    assert any(one.get("aligned") is not None for one in alone)
    for rank in ranks.run(tp, heard, folder, tp):
        for one, other in zip(alone, rank, strict=True):
            assert one.keys() == other.keys()
            assert list(one["text"]) == list(other["text"])
            for stream in one:
                np.testing.assert_allclose(other[stream], one[stream], rtol=1e-4, atol=1e-5)
