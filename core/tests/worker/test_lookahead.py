"""The overlapped loop: what it launches ahead, and what becomes of steps that should not have been."""

from __future__ import annotations

import random

import pytest

from mstar.engine.engine import Engine, Flight
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import Example, Miniature, miniature
from mstar.testing.miniatures.common import decode

REGISTRY = miniature_registry()


def driver(key: str, lookahead: bool = True, **overrides: object) -> tuple[Miniature, Driver]:
    mini = miniature(key)
    return mini, Driver(mini, REGISTRY, engine={"lookahead": lookahead}, **overrides)


def examples(mini: Miniature, count: int, seed: int = 5) -> dict[str, Example]:
    rng = random.Random(seed)
    return {f"r{i}": mini.example(rng) for i in range(count)}


def test_the_next_step_is_launched_before_the_last_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    launch, land = Engine._launch, Engine.land

    def noted_launch(self: Engine, work: object) -> Flight:
        order.append("launch")
        return launch(self, work)  # type: ignore[arg-type]

    def noted_land(self: Engine, flight: Flight) -> object:
        order.append("land")
        return land(self, flight)

    monkeypatch.setattr(Engine, "_launch", noted_launch)
    monkeypatch.setattr(Engine, "land", noted_land)
    mini, drive = driver("mini_chat")
    for name, example in examples(mini, 1).items():
        drive.submit(name, example)
    drive.run()
    assert order[:4] == ["launch", "launch", "land", "launch"]
    assert order.count("launch") == order.count("land")


def test_a_stop_is_never_visible_to_the_client_one_step_late() -> None:
    retracted: list[int] = []
    mini, drive = driver("mini_chat")
    plain = drive.worker.engine.retract

    def retract(flight: Flight, index: int) -> None:
        retracted.append(index)
        plain(flight, index)

    drive.worker.engine.retract = retract  # type: ignore[method-assign]
    asked = examples(mini, 80)
    for name, example in asked.items():
        drive.submit(name, example)
    drive.run()
    for name, example in asked.items():
        for stream, want in mini.expected(example).items():
            assert decode(drive.result(name).get(stream, [])) == want
    assert retracted, "some request ended by its stop token while its next step was under way"
    drive.assert_empty()


def test_the_scheduler_is_not_asked_while_nothing_changes() -> None:
    mini, drive = driver("mini_chat")
    ready: list[object] = []
    plain = drive.worker.scheduler.ready

    def noted(item: object) -> None:
        ready.append(item)
        plain(item)  # type: ignore[arg-type]

    drive.worker.scheduler.ready = noted  # type: ignore[method-assign, assignment]
    for name, example in examples(mini, 4).items():
        drive.submit(name, example)
    drive.run()
    assert len(ready) < drive.worker.engine.steps * 4 / 2
    drive.assert_empty()


def test_an_arrival_joins_a_batch_that_goes_on_by_itself() -> None:
    mini, drive = driver("mini_chat")
    first, *others = examples(mini, 6, seed=8).items()
    drive.submit(*first)
    for name, example in others:
        for _ in range(2):
            drive.worker.step()
        drive.submit(name, example)
    drive.run()
    for name, example in (first, *others):
        for stream, want in mini.expected(example).items():
            assert decode(drive.result(name).get(stream, [])) == want
    drive.assert_empty()
