"""Pictures in prompts: what is encoded, what is known, who waits for room, and captured steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from recording import record_steps

from mstar.registry import Registry
from mstar.spec.request import Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example, miniature
from mstar.testing.miniatures.catalog import look_answer, picture_size
from mstar.testing.miniatures.common import decode, encode

MINI = miniature("mini_look")
SIZES = {letter: picture_size(encode(letter)[0]) for letter in "ABCD"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def driven(registry: Registry, **overrides: Any) -> Driver:
    return Driver(MINI, registry, **overrides)


def ask(driver: Driver, name: str, text: str, count: int = 3) -> None:
    driver.submit(name, Example(text, {"max_tokens": count}))


def assert_right(driver: Driver, name: str, text: str, count: int = 3) -> None:
    assert decode(driver.result(name)["text"]) == decode(look_answer(encode(text), count))


def encoded(driver: Driver) -> int:
    """Patches that the encoder has seen."""
    return sum(entry["tokens"] for entry in driver.worker.status()["entries"] if entry["node"] == "eye")


def steps(driver: Driver) -> int:
    return sum(entry["steps"] for entry in driver.worker.status()["entries"] if entry["node"] == "eye")


def test_letters_are_of_different_sizes() -> None:
    assert sorted(SIZES.values()) == [1, 2, 3, 4]


def test_a_picture_is_encoded_once(registry: Registry) -> None:
    driver = driven(registry, resources={"kv": {"prefix_cache": False}})
    for i, text in enumerate(("aAb", "xAy", "AAA", "cBA")):
        ask(driver, f"r{i}", text)
        driver.run()
        assert_right(driver, f"r{i}", text)
    assert encoded(driver) == 2 * (SIZES["A"] + SIZES["B"])
    lookups = driver.worker.status()["media"]
    assert lookups == {"embeddings": 6 * SIZES["A"] + SIZES["B"], "hits": 3 * SIZES["A"] + 2 * SIZES["A"]}
    driver.assert_empty()


def test_a_picture_that_comes_twice_in_one_prompt_is_encoded_once(registry: Registry) -> None:
    driver = driven(registry)
    ask(driver, "r", "DaDbDD")
    driver.run()
    assert_right(driver, "r", "DaDbDD")
    assert encoded(driver) == 2 * SIZES["D"]


def test_what_another_request_has_encoded_meanwhile_is_left_out(registry: Registry) -> None:
    """Both are under way when the first has encoded the picture; the second's last piece is then known."""
    budget = SIZES["C"]
    driver = driven(registry, scheduler={"max_step_tokens": budget}, resources={"kv": {"prefix_cache": False}})
    ask(driver, "first", "aD")
    ask(driver, "second", "CD")
    ask(driver, "third", "DC")
    driver.run()
    for name, text in (("first", "aD"), ("second", "CD"), ("third", "DC")):
        assert_right(driver, name, text)
    assert encoded(driver) < 2 * (3 * SIZES["D"] + 2 * SIZES["C"])
    driver.assert_empty()


def test_nothing_is_kept_if_the_operator_says_so(registry: Registry) -> None:
    driver = driven(registry, resources={"media": {"cache": False}})
    for name in ("r0", "r1"):
        ask(driver, name, "abcA")
        driver.run()
    assert encoded(driver) == 2 * 2 * SIZES["A"]
    assert driver.worker.resources["media"].usage().cached == 0


def test_pictures_with_equal_places_are_told_apart_by_the_prefix_cache(registry: Registry) -> None:
    driver = driven(registry)
    other = next(c for c in "EFGHIJKLMNOP" if picture_size(encode(c)[0]) == SIZES["A"])
    for i, letter in enumerate(("A", other) * 2):
        ask(driver, f"r{i}", letter * 9)
        driver.run()
        assert_right(driver, f"r{i}", letter * 9)
    assert driver.worker.status()["prefix"]["hits"] > 0


def test_pictures_of_a_head_that_is_known_are_not_encoded_again(registry: Registry) -> None:
    """Also if their own embeddings had to give way."""
    driver = driven(registry, resources={"media": {"cache": False}})
    first = "aDDaCCabcdef"  # the last page of a prompt is computed in any case: no picture is in it
    second = f"{first}Bghijkl"
    for i, (text, new) in enumerate(((first, "DC"), (second, "B"), (second, ""), (f"{first}A", "A"))):
        before = encoded(driver)
        ask(driver, f"r{i}", text)
        driver.run()
        assert_right(driver, f"r{i}", text)
        assert encoded(driver) - before == 2 * sum(SIZES[letter] for letter in new)
    assert driver.worker.status()["prefix"]["hits"] > 0
    driver.assert_empty()


def test_steps_have_whole_pictures_and_as_many_as_fit(registry: Registry) -> None:
    text = "ABCD" * 3
    driver = driven(registry, scheduler={"max_step_tokens": 5}, resources={"media": {"cache": False}})
    ask(driver, "r", text)
    driver.run()
    assert_right(driver, "r", text)
    assert encoded(driver) == 2 * sum(SIZES.values())
    assert steps(driver) == 3  # the sizes are 1, 2, 3, 4 in some order


def test_a_picture_that_does_not_fit_into_what_is_left_of_a_step_waits(registry: Registry) -> None:
    large = [c for c in "ABCDEFGHIJKLMNOP" if picture_size(encode(c)[0]) == 4][:2]
    driver = driven(registry, scheduler={"max_step_tokens": 5})
    for name in large:
        ask(driver, name, name)
    driver.run()
    assert (encoded(driver), steps(driver)) == (2 * 8, 2)
    for name in large:
        assert_right(driver, name, name)


def test_the_room_is_reserved_and_given_to_others_when_it_is_needed(registry: Registry) -> None:
    room = SIZES["A"] + SIZES["B"]
    driver = driven(registry, resources={"media": {"tokens": room}, "kv": {"prefix_cache": False}})
    texts = {"r0": "aA", "r1": "bB", "r2": "AB", "r3": "BA", "r4": "AAx"[: 1 + (2 * SIZES["A"] <= room)]}
    for name, text in texts.items():
        ask(driver, name, text)
    driver.run()
    for name, text in texts.items():
        assert_right(driver, name, text)
    ask(driver, "large", "ABAB")
    driver.run()
    end = driver.ended["large"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (400, "request_too_large")
    driver.assert_empty()


def test_what_nobody_needs_gives_way_least_recently_used_first(registry: Registry) -> None:
    room = SIZES["A"] + SIZES["B"]
    driver = driven(registry, resources={"media": {"tokens": room}, "kv": {"prefix_cache": False}})
    for name, text in (("r0", "A"), ("r1", "B"), ("r2", "A")):
        ask(driver, name, text)
        driver.run()
    assert driver.worker.resources["media"].usage().cached == room
    before = encoded(driver)
    ask(driver, "r3", "C" if SIZES["C"] <= SIZES["B"] else "B")
    driver.run()
    ask(driver, "r4", "A")
    driver.run()
    assert encoded(driver) - before in (0, 2 * SIZES["C"])
    driver.assert_empty()


def test_media_are_held_no_longer_than_the_prompt(registry: Registry) -> None:
    driver = driven(registry)
    ask(driver, "r", "ABCDabc", count=8)
    driver.run(until=lambda: bool(driver.emitted.get("r")))
    assert "r" not in driver.ended
    assert driver.worker.resources["media"].usage().used == 0
    driver.run()
    assert_right(driver, "r", "ABCDabc", count=8)


def test_pixels_are_held_no_longer_than_they_are_needed(registry: Registry) -> None:
    driver = driven(registry)
    prepared = driver.prepare("r", Example("ABCDabc", {"max_tokens": 8}))
    pixels = weakref.ref(prepared.request.inputs["patches"])
    driver.worker.submit(prepared.request)
    del prepared
    assert pixels() is not None
    driver.run(until=lambda: bool(driver.emitted.get("r")))
    gc.collect()
    assert "r" not in driver.ended
    assert pixels() is None
    driver.run()
    assert_right(driver, "r", "ABCDabc", count=8)


def test_samples_of_one_prompt_look_once(registry: Registry) -> None:
    driver = driven(registry, resources={"media": {"cache": False}})
    prepared = driver.prepare("parent", Example("aBcD", {"max_tokens": 3}))
    driver.worker.submit(prepared.request)
    for i in range(3):
        sibling = driver.prepare(f"s{i}", Example("aBcD", {"max_tokens": 3})).request
        sibling.sibling_of = "parent"
        driver.worker.submit(sibling)
    driver.run()
    for name in ("parent", "s0", "s1", "s2"):
        assert_right(driver, name, "aBcD")
    assert encoded(driver) == 2 * (SIZES["B"] + SIZES["D"])
    driver.assert_empty()


def test_tenants_share_nothing(registry: Registry) -> None:
    driver = driven(registry)
    for name, tenant in (("r0", "one"), ("r1", "two"), ("r2", "one")):
        request = driver.prepare(name, Example("aA", {"max_tokens": 3})).request
        request.cache_salt = tenant
        driver.worker.submit(request)
        driver.run()
    assert encoded(driver) == 2 * 2 * SIZES["A"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pieces": np.zeros((0, 4), np.int64)}, "expected integers"),
        ({"pieces": np.array([[2, 2, 1, 1]])}, "2 items for each embedding"),
        ({"prompt": np.array([1, 2, 3])}, "0 placeholders"),
        ({"pieces": np.array([[2, 1, 1, 1]])}, "placeholders for 1 embeddings"),
    ],
)
def test_requests_that_do_not_add_up_fail_alone(change: dict[str, Any], words: str, registry: Registry) -> None:
    driver = driven(registry)
    bad = driver.prepare("bad", Example("aD", {"max_tokens": 3})).request
    bad.inputs.update(change)
    driver.worker.submit(bad)
    ask(driver, "good", "bD")
    driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert words in end.message
    assert_right(driver, "good", "bD")
    driver.assert_empty()


@pytest.mark.parametrize("lookahead", [False, True])
def test_captured_steps_are_plain_ones(lookahead: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(registry, engine={"lookahead": lookahead}, resources={"media": {"cache": False}})
    runner, recorder = record_steps(monkeypatch, driver, rows=8)
    texts = {f"r{i}": text for i, text in enumerate(("aDbC", "A", "xyz", "BBCa", "DDaD", "bC", "CACA", "hello"))}
    for turn in range(3):
        for name, text in texts.items():
            ask(driver, f"{turn}{name}", text)
            driver.worker.step()
            driver.take()
        driver.run()
    for turn in range(3):
        for name, text in texts.items():
            assert_right(driver, f"{turn}{name}", text)
    keys = [(*lane.key[:2], dict(lane.key[4]).get("media")) for lane in runner._lanes.values()]  # type: ignore[index, misc]
    assert {("eye", "forward", "write"), ("lm", "forward", "media"), ("lm", "forward", "text")} <= set(keys)
    assert not runner.faults
    assert recorder.replays > 20
    driver.assert_empty()


def test_more_segments_than_a_graph_has_run_as_plain_calls(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(registry, resources={"media": {"cache": False}})
    runner, _ = record_steps(monkeypatch, driver, rows=8)
    monkeypatch.setattr("mstar.resources.ragged._SEGMENTS", (2,))
    for name, text in (("few", "aD"), ("many", "aBCD")):
        ask(driver, name, text)
        driver.run()
        assert_right(driver, name, text)
    eyes = [lane for lane in runner._lanes.values() if lane.key[0] == "eye"]  # type: ignore[index]
    assert [dict(lane.key[4])["within"] for lane in eyes] == [2]  # type: ignore[index]
