"""The layout that ships with Qwen3-TTS: the codec in a process of its own, and the same sound to the bit."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mstar
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.opening import merged_deployment
from mstar.settings import Settings
from mstar.spec.tasks import Audio
from mstar.testing import Driver, Example
from mstar.testing.rank_drive import RankDriver
from mstar_tts.qwen3_tts import tiny
from mstar_tts.qwen3_tts.spec import MODELS

LAYOUT = "codec_apart"
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine": {"threads": 1}}
TEXTS = ("one", "a cat sat on a mat", "the bird")
EXTRA = () if importlib.metadata.entry_points(group="mstar.plugins", name="tts") else ("mstar_tts.plugin",)
SETTINGS = Settings(extra_plugins=EXTRA)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(load_plugins(SETTINGS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(key: str) -> Path:
        if key not in made:
            made[key] = tmp_path_factory.mktemp(key)
            getattr(tiny, f"write_{key}")(made[key])
        return made[key]

    return of


def examples(key: str) -> list[Example]:
    """Long enough for windows of several sizes, the codec's state and, of a clone, what its clip leaves there."""
    knobs: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    parts: tuple[Audio, ...] = ()
    if key == "qwen3_tts_base":
        knobs["ref_text"] = "so it goes"
        parts = (Audio(np.random.default_rng(0).normal(0, 0.1, 13_000).astype(np.float32), 24_000),)
    return [Example(text, {**knobs, "seed": number}, parts=parts) for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize("key", [spec.key for spec in MODELS])
def test_every_key_has_it(registry: Registry, key: str) -> None:
    deployment, places = merged_deployment(registry.model(key), {"layout": LAYOUT}, registry)
    assert {node: place.ranks for node, place in deployment.placement.items()} == {"codec": (1,)}
    assert [deployment.gpu_of(rank) for rank in (0, 1)] == [0, 0]
    assert deployment.max_concurrent_requests == 64  # the package's own defaults hold beside it
    assert places["placement.codec"].endswith("codec_apart.yaml")


@pytest.mark.parametrize("key", ["qwen3_tts", "qwen3_tts_base"])
def test_it_says_what_one_rank_says(registry: Registry, folder: Callable[[str], Path], key: str) -> None:
    alone = Driver(key, registry, folder(key), **EXACT, resources={"kv": {"tokens": 8192}})
    apart = RankDriver(key, registry, folder(key), **EXACT, layout=LAYOUT)
    assert "codec" not in apart.worker.engine.nodes
    for number, example in enumerate(examples(key)):
        sounds = []
        for driver in (alone, apart):
            driver.submit(str(number), example)
            driver.run()
            sounds.append(driver.result(str(number))["audio"])
        assert sounds[0].size == 29 * 1920
        np.testing.assert_array_equal(sounds[0], sounds[1])
    for driver in (alone, apart):
        driver.assert_empty()


def test_two_processes_say_what_one_says(registry: Registry, folder: Callable[[str], Path]) -> None:
    key, said = "qwen3_tts", []
    for placed in ({"resources": {"kv": {"tokens": 8192}}}, {"layout": LAYOUT}):
        told = {**EXACT, **placed, "executor": "processes"}
        with mstar.load(key, weights=str(folder(key)), settings=SETTINGS, registry=registry, **told) as model:
            sounds = [model.generate(example.text, **example.knobs).audio.samples for example in examples(key)]
            status = model.status()
        said.append(sounds)
    for one, two in zip(*said, strict=True):
        assert one.size == 29 * 1920
        np.testing.assert_array_equal(one, two)
    assert status["ranks"][0]["steps"] >= 5 * len(TEXTS)  # windows of 1, 3, 8, 16 and the rest
