"""Playback deadlines of streams reach the scheduler: who is about to fall silent goes first."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from mstar.engine.engine import Flight
from mstar.engine.step import Work
from mstar.scheduler.base import Item
from mstar.spec.request import Cancel, Done
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, miniature

pytestmark = pytest.mark.usefixtures("loop")


@pytest.fixture
def frozen_clock(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    return 1000.0


def record_items(driver: Driver) -> list[Item]:
    scheduler, items = driver.worker.scheduler, []
    plain = scheduler.ready

    def ready(item: Item) -> None:
        items.append(item)
        plain(item)

    scheduler.ready = ready  # type: ignore[method-assign]
    return items


def record_steps(driver: Driver) -> list[tuple[str, str]]:
    """(node, request) of each row that ran."""
    engine, rows = driver.worker.engine, []
    plain = engine.launch

    def launch(work: Sequence[Work]) -> list[Flight]:
        rows.extend((w.call.op.call.node, w.call.run.request.id) for w in work)
        return plain(work)

    engine.launch = launch  # type: ignore[method-assign]
    return rows


def test_a_deadline_is_when_playback_runs_out(frozen_clock: float) -> None:
    driver = Driver(miniature("mini_tts"))
    items = record_items(driver)
    driver.submit("r", Example("hello", {"max_tokens": 12}))
    driver.run()
    sent = 0
    expected = {frozen_clock}
    for event in driver.emitted["r"]:
        sent += len(event.data)
        expected.add(frozen_clock + sent / 8000)
    deadlines = [item.deadline for item in items]
    assert {round(d or 0, 6) for d in deadlines} <= {round(d, 6) for d in expected}
    assert deadlines == sorted(deadlines, key=lambda d: d or 0)  # each chunk sent moves it on
    assert deadlines[-1] != deadlines[0]


def test_nobody_listens_in_real_time_without_a_playback_clock() -> None:
    driver = Driver(miniature("mini_chat"))
    items = record_items(driver)
    driver.submit("r", Example("hello"))
    driver.run()
    assert items
    assert all(item.deadline is None for item in items)


def test_a_silent_client_goes_before_one_that_has_sound_to_play(frozen_clock: float) -> None:
    driver = Driver(miniature("mini_tts"), scheduler={"max_step_rows": 1})
    steps = record_steps(driver)
    driver.submit("playing", Example("hello", {"max_tokens": 40}))
    driver.run(until=lambda: len(driver.emitted.get("playing", ())) >= 2)
    steps.clear()
    driver.submit("silent", Example("hello", {"max_tokens": 40}))
    driver.run(until=lambda: "silent" in driver.emitted)
    language = [request for node, request in steps if node == "lm"]
    assert language.count("silent") >= 1
    assert "playing" not in language[language.index("silent") :]
    driver.run()
    driver.assert_empty()


class Steps:
    """A clock that moves on with each step of the worker: a code plays 0.5 ms, and no request is alone."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch, each: float):
        self.now, plain = 1000.0, driver.worker.step

        def step() -> bool:
            self.now += each
            return plain()

        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(driver.worker, "step", step)


def test_a_listener_hears_nothing_before_playback_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where codes come hardly faster than they are heard, the first piece (one code) waits for the second (three)."""
    driver = Driver(miniature("mini_tts"))
    Steps(driver, monkeypatch, 0.0002)
    driver.submit("r", Example("hello", {"max_tokens": 60}))
    driver.run(until=lambda: "r" in driver.emitted)
    assert [len(piece.data) for piece in driver.emitted["r"]][:2] == [4, 12]
    items = record_items(driver)
    driver.run()
    assert driver.ended["r"].reason == "length"
    assert len(driver.result("r")["audio"]) == driver.ended["r"].usage.output["audio"] == 4 * 60
    assert items
    driver.assert_empty()


@pytest.mark.parametrize("how", ["cancel", "time"])
def test_what_is_held_is_heard_when_the_request_ends_early(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    driver = Driver(miniature("mini_tts"), request_timeout_s=60.0)
    clock = Steps(driver, monkeypatch, 0.0002)
    driver.submit("r", Example("hello", {"max_tokens": 60}))
    nodes = record_steps(driver)
    driver.run(until=lambda: ("codec", "r") in nodes and nodes[-1] == ("lm", "r"))
    driver.run(until=lambda: True)
    assert "r" not in driver.emitted
    if how == "cancel":
        driver.worker.cancel(Cancel(id="r"))
    else:
        clock.now += 1e6
    driver.run()
    (piece,) = driver.emitted["r"]
    assert len(piece.data) == 4
    end = driver.ended["r"]
    if isinstance(end, Done):
        assert end.usage.output["audio"] == 4
    driver.assert_empty()
