"""Playback deadlines of streams reach the scheduler: who is about to fall silent goes first."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from mstar.engine.engine import Flight
from mstar.engine.step import Work
from mstar.scheduler.base import Item
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
