"""Pictures in prompts that another rank reads: what it encodes, what it knows, what fails, and what moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mstar.nn.node import Step
from mstar.registry import Registry
from mstar.spec.request import Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example, miniature
from mstar.testing.miniatures.looking import Eye
from mstar.testing.rank_drive import RankDriver

from .test_media import SIZES, ask, assert_right

PLACES: dict[str, dict[str, int]] = {
    "decoded elsewhere": {"prefill": 1, "decode": 0},
    "read elsewhere": {"look": 1, "generate": 0},
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Patches of each of the encoder's steps."""
    seen: list[int] = []
    plain = Eye.forward

    def counted(self: Eye, step: Step, patches: Tensor) -> dict[str, Any]:
        seen.append(len(patches))
        return plain(self, step, patches)

    monkeypatch.setattr(Eye, "forward", counted)
    return seen


def apart(registry: Registry, places: dict[str, int], **overrides: Any) -> RankDriver:
    return RankDriver(miniature("mini_look"), registry, placement={"eye": places, "lm": places}, **overrides)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_a_picture_is_encoded_once(places: dict[str, int], registry: Registry, patches: list[int]) -> None:
    driver = apart(registry, places, resources={"kv": {"prefix_cache": False}})
    for i, text in enumerate(("aAb", "xAy", "AAA", "cBA")):
        ask(driver, f"r{i}", text)
        driver.run()
        assert_right(driver, f"r{i}", text)
    assert sum(patches) == 2 * (SIZES["A"] + SIZES["B"])
    driver.assert_empty()


def test_steps_there_have_whole_pictures_and_as_many_as_fit(registry: Registry, patches: list[int]) -> None:
    """Each request has all of its pictures told at once; the rank cuts them."""
    driver = apart(registry, PLACES["read elsewhere"], scheduler={"max_step_tokens": 5})
    texts = ("ABCD", "xDCx")
    for i, text in enumerate(texts):
        ask(driver, f"r{i}", text)
    driver.run()
    for i, text in enumerate(texts):
        assert_right(driver, f"r{i}", text)
    assert len(patches) > 1
    assert max(patches) <= 2 * 5
    driver.assert_empty()


def test_embeddings_that_have_moved_are_kept_where_they_are_read(registry: Registry) -> None:
    driver = apart(registry, PLACES["read elsewhere"])
    ask(driver, "r", "aAbB")
    driver.run()
    pools = driver.worker.resources["media"], driver.wires[1].follower.resources["media"]
    assert [pool.usage().cached for pool in pools] == [SIZES["A"] + SIZES["B"]] * 2
    assert driver.worker.status()["moves"]["done"] == 1
    driver.assert_empty()


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_an_encoder_that_fails_there_fails_its_request_alone(
    places: dict[str, int], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not encoded is not taken for known afterwards."""
    plain, faults = Eye.forward, [0]

    def broken(self: Eye, step: Step, patches: Tensor) -> dict[str, Any]:
        if len(patches) == 2 * SIZES["C"] and faults[0] < 4:  # also when it is tried by itself
            faults[0] += 1
            raise RuntimeError("no picture")
        return plain(self, step, patches)

    monkeypatch.setattr(Eye, "forward", broken)
    driver = apart(registry, places, scheduler={"max_step_tokens": 1})  # a picture a step
    ask(driver, "bad", "aBCd")
    ask(driver, "good", "aBd")
    driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert (end.code, end.status) == ("internal_error", 500)
    assert_right(driver, "good", "aBd")
    faults[0] = 4
    ask(driver, "again", "aBCd")
    driver.run()
    assert_right(driver, "again", "aBCd")
    driver.assert_empty()


def test_pieces_that_do_not_add_up_are_refused_before_anything_is_sent(registry: Registry) -> None:
    driver = apart(registry, PLACES["decoded elsewhere"])
    prepared = driver.prepare("bad", Example("aAb", {"max_tokens": 3}))
    pieces = np.asarray(prepared.request.inputs["pieces"]).copy()
    pieces[0, 1] += 1
    prepared.request.inputs["pieces"] = pieces
    driver.worker.submit(prepared.request)
    driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert end.status == 400
    ask(driver, "good", "aAb")
    driver.run()
    assert_right(driver, "good", "aAb")
    driver.assert_empty()


def test_room_is_waited_for_as_on_one_rank(registry: Registry) -> None:
    """Of three requests one fits at a time, and one never does."""
    pools = {"media": {"tokens": 10, "max_tokens": 10}}
    texts = {"ABCD": True, "DCBA": True, "ABCDA": False, "BBBB": SIZES["B"] * 4 <= 10}
    for driver in (
        Driver(miniature("mini_look"), registry, resources=pools),
        apart(registry, PLACES["decoded elsewhere"], resources=pools),
    ):
        for text in texts:
            ask(driver, text, text, 5)
        driver.run()
        for text, fits in texts.items():
            if fits:
                assert_right(driver, text, text, 5)
            else:
                assert isinstance(driver.ended[text], Failed)
        driver.assert_empty()
