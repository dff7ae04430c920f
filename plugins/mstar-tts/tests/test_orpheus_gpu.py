"""Orpheus on a GPU: language model and codec in captured steps, and the codec's sound is the CPU's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar_tts.orpheus.tiny import write_orpheus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LISTENERS, FRAMES = 5, 12


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Heads of 64, as attention on a GPU wants them."""
    folder: Path = tmp_path_factory.mktemp("orpheus")
    write_orpheus(folder, hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar_tts.plugin",))))
    return Driver("orpheus", registry, folder, device="cuda", dtype="bfloat16")


def test_captured_from_the_first_request_on(driver: Driver) -> None:
    runner: Any = driver.worker.engine.runner
    prepared = set(runner._lanes)
    assert {(key[1], key[2]) for key in prepared if key[0] == "codec"} >= {("forward", 1), ("forward", 8)}
    for name in range(LISTENERS):
        knobs = {"seed": name, "max_tokens": 7 * FRAMES, "ignore_eos": True}
        driver.submit(f"r{name}", Example("one small bird", knobs))
    driver.run()
    assert not runner.faults
    assert {key for key in runner._lanes if key[0] == "lm" and key[2] == key[3]} <= prepared
    for name in range(LISTENERS):
        sound = driver.result(f"r{name}")["audio"]
        assert len(sound) > (FRAMES - 3) * 2048
        assert np.isfinite(sound).all()
    driver.assert_empty()


@torch.inference_mode()
def test_the_codec_is_the_cpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # random weights make much of ten bits
    codec: Any = driver.worker.engine.nodes["codec"]
    first = torch.tensor([start for start, _ in codec.tokens.ranges] * 4)
    codes = first + torch.randint(0, codec.tokens.codes, (3, 28), generator=torch.Generator().manual_seed(3))
    told = [torch.tensor(values) for values in ([7, 7, 0], [5, -9, 77], [0, 700, 0])]
    here = codec(None, codes.cuda(), *(value.cuda() for value in told))["samples"].cpu()
    there = copy.deepcopy(codec).cpu()(None, codes, *told)["samples"]
    assert (here - there).norm() / there.norm() < 2e-3
