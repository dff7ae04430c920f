"""Qwen3-TTS on a GPU: the talker with its predictor and the codec in captured steps; the codec's sound is the CPU's."""

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
from mstar_tts.qwen3_tts import tiny

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LISTENERS, FRAMES = 5, 16


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Heads of 64, as attention on a GPU wants them."""
    folder: Path = tmp_path_factory.mktemp("qwen3_tts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny._SIZES, "head_dim", 64)
        patch.setitem(tiny._ROPE, "mrope_section", [16, 8, 8])
        tiny.write_qwen3_tts(folder)
    registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar_tts.plugin",))))
    pools = {"kv": {"tokens": 8192}}
    return Driver("qwen3_tts", registry, folder, device=DEVICE, dtype="bfloat16", resources=pools)


def test_captured_from_the_first_request_on(driver: Driver) -> None:
    runner: Any = driver.worker.engine.runner
    prepared = set(runner._lanes)
    assert {(key[0], key[2]) for key in prepared} >= {("talker", 1), ("talker", 8), ("codec", 1), ("codec", 8)}
    for name in range(LISTENERS):
        knobs = {"seed": name, "max_new_tokens": FRAMES + 1, "ignore_eos": True, "non_streaming_mode": name % 2 == 0}
        driver.submit(f"r{name}", Example("a cat sat on a mat", knobs))
    driver.run()
    assert not runner.faults
    assert {key for key in runner._lanes if key[0] == "talker" and key[1] == "forward" and key[2] == key[3]} <= prepared
    for name in range(LISTENERS):
        sound = driver.result(f"r{name}")["audio"]
        assert 0 < len(sound) <= FRAMES * 1920
        assert len(sound) % 1920 == 0
        assert np.isfinite(sound).all()
    driver.assert_empty()


@torch.inference_mode()
def test_the_codec_is_the_cpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # random weights make much of ten bits
    decoder: Any = driver.worker.engine.nodes["codec"].decoder
    codes = torch.randint(tiny.CODES, (3, 12, 16), generator=torch.Generator().manual_seed(3))

    def sound(module: Any, device: str) -> torch.Tensor:
        state, pieces = module.begin(len(codes), torch.device(device), torch.float32), []
        for piece in codes.to(device).split([1, 3, 8], 1):
            samples, state = module(piece, state)
            pieces.append(samples.cpu())
        return torch.cat(pieces, 1)

    here, there = sound(decoder, DEVICE), sound(copy.deepcopy(decoder).cpu(), "cpu")
    assert (here - there).norm() / there.norm() < 2e-3
