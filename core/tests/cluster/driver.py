"""Drives an executor in tests: collects events and waits for ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.inline import InlineExecutor
from mstar.cluster.processes import ProcessesExecutor
from mstar.cluster.single import SingleWorkerExecutor
from mstar.spec.deployment import merge_deployment
from mstar.spec.request import Done, Emit, Event, Failed

FAKE = "fake_worker:FakeWorker"


def fake_config(key: str = "fake", **options: Any) -> WorkerConfig:
    return WorkerConfig(key=key, weights=None, deployment=merge_deployment(key, {"model_kwargs": options}))


class Driver:
    """One executor over the fake worker. *how*: ``inline`` or ``processes``."""

    def __init__(self, how: str, config: WorkerConfig, **limits: Any):
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.phases: list[Phase] = []
        self._changed = asyncio.Event()
        self.executor: SingleWorkerExecutor
        if how == "inline":
            self.executor = InlineExecutor(config, self._take, self._phase, worker_factory=FAKE)
        else:
            limits = {"restart_delay_s": 0.01, **limits}
            self.executor = ProcessesExecutor(
                config,
                self._take,
                self._phase,
                worker_factory=FAKE,
                registry_factory="fake_worker:no_registry",
                **limits,
            )

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events[event.id].append(event)
        self._changed.set()

    def _phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        self._changed.set()

    async def __aenter__(self) -> Driver:
        await self.executor.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.executor.stop()

    async def until(self, condition: Any) -> None:
        """Wait until *condition()* holds; it is looked at after every event and phase."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self, request: str) -> Done | Failed:
        await self.until(lambda: self.ended(request))
        event = self.events[request][-1]
        assert isinstance(event, Done | Failed)
        return event

    def ended(self, request: str) -> bool:
        events = self.events[request]
        return bool(events) and isinstance(events[-1], Done | Failed)

    def data(self, request: str) -> list[Any]:
        return [event.data for event in self.events[request] if isinstance(event, Emit)]

    @property
    def phase_names(self) -> list[str]:
        return [phase.name for phase in self.phases]
