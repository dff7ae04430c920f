"""Whoever watches a service is told of every request's end once, whatever the end is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import SPEC, FakeRegistry, counting, fake_config

from mstar.runtime.service import Service
from mstar.runtime.watch import Outcome
from mstar.spec.errors import RequestError, TooBusy
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Delta
from mstar.spec.request import EngineRequest, Event, Profile
from mstar.spec.tasks import Task


class Note:
    def __init__(self, request_id: str):
        self.id, self.heard_events, self.made_deltas = request_id, list[Event](), list[Delta]()
        self.request: EngineRequest | None = None
        self.ends: list[tuple[Outcome, Profile | None]] = []

    def prepared(self, request: EngineRequest) -> None:
        self.request = request

    def heard(self, event: Event) -> None:
        self.heard_events.append(event)

    def made(self, delta: Delta) -> None:
        self.made_deltas.append(delta)

    def ended(self, outcome: Outcome, profile: Profile | None) -> None:
        self.ends.append((outcome, profile))


class Notes:
    def __init__(self) -> None:
        self.notes: list[Note] = []

    def begin(self, spec: ModelSpec, task: Task, request_id: str) -> Note:
        self.notes.append(Note(request_id))
        return self.notes[-1]


async def read(service: Service, task: Task) -> None:
    async for _ in await service.generate(task, "r"):
        pass


async def cancel(service: Service, task: Task) -> None:
    answer = await service.generate(task, "r")
    answer.cancel("enough")
    async for _ in answer:
        pass


async def drop(service: Service, task: Task) -> None:
    answer = await service.generate(task, "r")
    await answer.first()
    del answer
    gc.collect()


async def close_twice(service: Service, task: Task) -> None:
    answer = await service.generate(task, "r")
    answer.close()
    await answer.aclose()


async def give_up(service: Service, task: Task) -> None:
    asking = asyncio.ensure_future(service.generate(task, "r"))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.wait([asking])


Case = tuple[Callable[[Service, Task], Awaitable[None]], Task, Any]
CASES: dict[str, Case] = {
    "read to the end": (read, counting(5), "stop"),
    "ended by a stop string": (read, counting(50, stop=("9",)), "stop"),
    "cancelled": (cancel, counting(10_000), "enough"),
    "held by nobody": (drop, counting(10_000), None),
    "closed": (close_twice, counting(10_000), None),
    "refused by the processor": (read, counting(3, "refuse"), RequestError),
    "failed in the renderer": (read, counting(3, "render"), Exception),
    "failed in the worker": (read, counting(3, "raise"), RequestError),
    "given up while it is prepared": (give_up, counting(3, "slow"), asyncio.CancelledError),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_request_is_told_to_have_ended_once(case: str) -> None:
    how, task, end = CASES[case]
    service = Service(SPEC, fake_config(), FakeRegistry())  # type: ignore[arg-type]
    notes = service.watcher = Notes()
    await service.start()
    try:
        try:
            await how(service, task)
        except Exception as error:
            assert isinstance(end, type) and isinstance(error, end)  # noqa: PT017, PT018
        (note,) = notes.notes
        async with asyncio.timeout(10):
            while not note.ends:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
    finally:
        await service.stop()
    ((outcome, _),) = note.ends
    if isinstance(end, type):
        assert isinstance(outcome.error, end)
        assert outcome.reason is None
    else:
        assert (outcome.error, outcome.reason) == (None, end)
    if case == "read to the end":
        assert (outcome.prompt_tokens, outcome.tokens) == (7, 5)
        assert note.request is not None
        assert len(note.heard_events) == 6


async def test_a_full_queue_is_an_end_too() -> None:
    service = Service(SPEC, fake_config(max_concurrent_requests=1, scheduler={"max_queue": 0}), FakeRegistry())  # type: ignore[arg-type]
    notes = service.watcher = Notes()
    await service.start()
    try:
        first = await service.generate(counting(10_000), "one")
        with pytest.raises(TooBusy):
            await service.generate(counting(3), "two")
        assert [len(note.ends) for note in notes.notes] == [0, 1]
        first.close()
    finally:
        await service.stop()
    assert [len(note.ends) for note in notes.notes] == [1, 1]
