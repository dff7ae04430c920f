"""Kokoro's steps are of few shapes, so that a GPU soon has a captured graph for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.engine.graphs import GraphRunner, Recorder
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar_tts.kokoro.tiny import write_kokoro

SAID = "həlˈO wˈɜɹld"
LISTENERS, ANSWERS = 7, 6


class Again(Recorder):
    """As a CUDA graph: the same tensors are read again, and the same outputs are filled."""

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        outputs = function()

        def replay() -> None:
            for port, value in function().items():
                outputs[port].copy_(value)

        return outputs, replay


class Counting(GraphRunner):
    """:ivar plain: (node, rows) of steps that have a row for each input and ran as plain calls."""

    def __init__(self, driver: Driver):
        super().__init__(driver.worker.config.deployment.engine, Again(), "cpu")
        self.plain: list[tuple[str, int]] = []

    def lane(self, work: Any, variants: Any) -> Any:
        lane = super().lane(work, variants)
        op = work[0].call.op
        if lane is None and op.entry.name == "forward":
            self.plain.append((op.call.node, len(work)))
        return lane


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kokoro")
    write_kokoro(folder)
    return folder


def said(driver: Driver, name: str) -> np.ndarray:
    sound: np.ndarray = driver.result(name)["audio"].reshape(-1)
    return sound


def test_listeners_out_of_step_soon_run_in_captured_steps(weights: Path) -> None:
    """Each asks again when it has heard its answer; a new one comes with every answer at first. Rows vary from one to
    seven, and each of the sizes that they are filled up to runs plainly once."""
    registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar_tts.plugin",))))
    driver = Driver("kokoro", registry, weights, device="cpu", model_kwargs={"max_batch_rows": 8})
    driver.submit("alone", Example("", {"phonemes": SAID, "seed": 3}))
    driver.run()
    runner = driver.worker.engine.runner = Counting(driver)
    driver.worker.engine.prepare(driver.worker.plan, 64, 512, lambda done, total: None)
    left = dict.fromkeys(range(LISTENERS), ANSWERS)
    for listener in left:
        driver.submit(f"{listener}/{ANSWERS}", Example("", {"phonemes": SAID, "seed": 3}))
        driver.run(until=lambda: True)  # one step
    while any(left.values()):
        driver.run(until=lambda: True)
        for listener, count in left.items():
            if count and f"{listener}/{count}" in driver.ended:
                left[listener] -= 1
                if count > 1:
                    driver.submit(f"{listener}/{count - 1}", Example("", {"phonemes": SAID, "seed": 3}))
    assert not runner.faults
    assert len(runner.plain) <= 2 + 4, runner.plain  # of text for 4 and 16, of frames for 1, 2, 4 and 8
    assert len(set(runner.plain)) > 1
    for name in driver.ended:
        np.testing.assert_allclose(said(driver, name), said(driver, "alone"), atol=1e-3)
    driver.assert_empty()
