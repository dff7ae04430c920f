"""Steps in captured graphs give what plain steps give."""

from __future__ import annotations

import random

import numpy as np
import pytest
from recording import record_steps

from mstar.engine.graphs import row_buckets
from mstar.registry import Registry
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import MINIATURES, Miniature
from mstar.testing.miniatures.common import decode


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.mark.parametrize("most", [1, 3, 8, 31, 64, 100, 256, 300, 1000])
def test_buckets_reach_the_most_rows_and_waste_little(most: int) -> None:
    sizes = row_buckets(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(s for s in sizes if s >= rows)
        assert size - rows <= max(3, rows * 0.42)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("mini", MINIATURES, ids=lambda m: m.key)
def test_miniatures(mini: Miniature, lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(mini, registry, engine={"lookahead": lookahead})
    runner, recorder = record_steps(monkeypatch, driver, rows=16)
    rng = random.Random(4)
    asked = {f"r{i}": mini.example(rng) for i in range(12)}
    for name, example in asked.items():
        driver.submit(name, example)
    driver.run()
    for name, example in asked.items():
        got = driver.result(name)
        for stream, want in mini.expected(example).items():
            if isinstance(want, str):
                assert decode(got.get(stream, [])) == want
            else:
                np.testing.assert_allclose(got[stream], want, rtol=1e-6, atol=mini.tolerance)
    driver.assert_empty()
    print(mini.key, runner.captured, recorder.replays, runner.faults)
