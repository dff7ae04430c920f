"""The overlapped loop: what it launches ahead, and what becomes of steps that should not have been."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mstar.engine.engine import Engine, Flight
from mstar.engine.step import RowResult, Work
from mstar.scheduler.base import Item
from mstar.spec.request import Done
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


@pytest.mark.parametrize("key", ["mini_chat", "mini_hybrid"])
def test_a_stop_is_never_visible_to_the_client_one_step_late(key: str) -> None:
    retracted: list[int] = []
    mini, drive = driver(key)
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


def test_rows_that_go_on_are_offered_together_and_priorities_apart() -> None:
    mini, drive = driver("mini_chat")
    rows: list[tuple[int, int]] = []
    plain = drive.worker.scheduler.ready

    def noted(item: Item) -> None:
        rows.append((item.rows, item.priority))
        plain(item)

    drive.worker.scheduler.ready = noted  # type: ignore[method-assign]
    asked = examples(mini, 7)
    for number, (name, example) in enumerate(asked.items()):
        prepared = drive.prepare(name, replace(example, knobs={**example.knobs, "max_tokens": 20}))
        request = structs.replace(prepared.request, priority=number % 2)
        drive.submit_prepared(replace(prepared, request=request), example)
    drive.run()
    assert {(4, 0), (3, 1)} <= set(rows)
    drive.assert_empty()


def test_who_is_cancelled_is_left_out_of_the_step_that_was_offered(caplog: pytest.LogCaptureFixture) -> None:
    mini, drive = driver("mini_chat")
    asked = examples(mini, 5)
    for name, example in asked.items():
        drive.submit(name, example)
    drive.run(until=lambda: set(asked) <= set(drive.emitted))
    assert not drive.worker.scheduler.idle
    drive.cancel("r2")
    drive.run()
    for name, example in asked.items():
        if name != "r2":
            for stream, want in mini.expected(example).items():
                assert decode(drive.result(name).get(stream, [])) == want
    assert isinstance(drive.ended["r2"], Done)
    assert not caplog.records  # no step has failed
    drive.assert_empty()


def test_all_of_a_cohort_may_end_before_its_step(caplog: pytest.LogCaptureFixture) -> None:
    mini, drive = driver("mini_chat")
    asked = examples(mini, 3)
    for name, example in asked.items():
        drive.submit(name, example)
    for _ in range(4):
        drive.worker.step()
    assert not drive.worker.scheduler.idle
    for name in asked:
        drive.cancel(name)
    drive.run()
    assert drive.worker.scheduler.idle
    assert not caplog.records
    drive.assert_empty()


@pytest.mark.parametrize("lookahead", [False, True])
def test_prompts_that_take_turns_with_decodes_say_what_they_say_together(lookahead: bool) -> None:
    mini, drive = driver("mini_chat", lookahead, scheduler={"max_mixed_rows": 1, "max_step_tokens": 16})
    mixed: list[set[bool]] = []
    plain = drive.worker.engine.launch

    def noted(work: Sequence[Work]) -> list[Flight]:
        mixed.append({w.call.decode for w in work})
        return plain(work)

    drive.worker.engine.launch = noted  # type: ignore[method-assign]
    asked = examples(mini, 12)
    for number, (name, example) in enumerate(asked.items()):
        drive.submit(name, example)
        if number > 2:
            drive.worker.step()
    drive.run()
    for name, example in asked.items():
        for stream, want in mini.expected(example).items():
            assert decode(drive.result(name).get(stream, [])) == want
    assert {True} in mixed
    assert mixed.count({False}) > mixed.count({True, False})
    drive.assert_empty()


def test_a_scheduler_without_cohorts_gets_an_item_for_each_row() -> None:
    mini, drive = driver("mini_chat")
    rows: list[int] = []
    plain = drive.worker.scheduler.ready
    drive.worker.scheduler.cohorts = False

    def noted(item: Item) -> None:
        rows.append(item.rows)
        plain(item)

    drive.worker.scheduler.ready = noted  # type: ignore[method-assign]
    asked = examples(mini, 4)
    for name, example in asked.items():
        drive.submit(name, example)
    drive.run()
    assert set(rows) == {1}
    for name, example in asked.items():
        for stream, want in mini.expected(example).items():
            assert decode(drive.result(name).get(stream, [])) == want
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


@pytest.mark.parametrize("key", ["mini_hybrid", "mini_seq2seq", "mini_rollout"])
def test_state_of_other_kinds_is_launched_ahead_too(key: str) -> None:
    """While one step runs the next one is launched; with two in flight the loop lands the first of them."""
    mini, drive = driver(key)
    worker, ahead = drive.worker, []
    plain = worker.ahead._foresee

    def noted(flight: Flight) -> None:
        plain(flight)
        ahead.extend(w.call.partition.ahead is not None for w in flight.work)

    worker.ahead._foresee = noted  # type: ignore[method-assign]
    asked = examples(mini, 6)
    for name, example in asked.items():
        drive.submit(name, example)
    drive.run()
    assert sum(ahead) > len(ahead) / 2
    for name, example in asked.items():
        for stream, want in mini.expected(example).items():
            got = drive.result(name).get(stream, [])
            if isinstance(want, str):
                assert decode(got) == want
            else:
                np.testing.assert_allclose(got, want, rtol=1e-6)
    drive.assert_empty()


def test_a_session_goes_on_from_the_state_before_a_retracted_step() -> None:
    """The request ends by its stop token while its next step is under way; the session's next one must not see it."""
    hits = 0
    for seed in range(40):
        answers = []
        for lookahead in (False, True):
            _, drive = driver("mini_hybrid", lookahead)
            drive.worker.admission._kept = frozenset({"state", "kv", "positions"})
            asked = Example("abc", {"max_tokens": 12, "stop_token": seed})
            drive.submit("first", asked, session="s")
            drive.run()
            drive.submit("second", Example("b", {"max_tokens": 6}), session="s")
            drive.run()
            answers.append([drive.result(name)["text"] for name in ("first", "second")])
            hits += drive.ended["first"].reason == "stop"  # type: ignore[union-attr]
        assert answers[0] == answers[1]
    assert hits


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_what_follows_a_loop_of_known_length_is_launched_before_its_last_step_has_landed(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    order: list[tuple[str, str]] = []
    launch, land = Engine._launch, Engine.land

    def what(work: Sequence[Work]) -> str:
        op = work[0].call.op
        return "write" if op.entry.name != "imagine" else "show" if op.call.emit else "paint"

    def noted_launch(self: Engine, work: Sequence[Work]) -> Flight:
        order.append(("launch", what(work)))
        return launch(self, work)

    def noted_land(self: Engine, flight: Flight) -> list[RowResult | Exception]:
        order.append(("land", what(flight.work)))
        return land(self, flight)

    monkeypatch.setattr(Engine, "_launch", noted_launch)
    monkeypatch.setattr(Engine, "land", noted_land)
    mini, drive = driver("mini_unified")
    (example,) = examples(mini, 1).values()
    example = replace(example, knobs={**example.knobs, "steps": steps}, want=())
    drive.submit("r", example)
    drive.run()
    assert order.count(("launch", "paint")) == steps
    assert order.index(("launch", "show")) < len(order) - 1 - order[::-1].index(("land", "paint"))
    np.testing.assert_allclose(drive.result("r")["pixels"], mini.expected(example)["pixels"], rtol=1e-6)
    drive.assert_empty()
