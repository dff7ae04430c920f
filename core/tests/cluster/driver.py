"""Drives executors in tests: collects events and waits for ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.choice import processes
from mstar.cluster.inline import InlineExecutor
from mstar.cluster.processes import ProcessesExecutor
from mstar.cluster.single import SingleWorkerExecutor
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.processor import ProcessorContext
from mstar.spec.request import Done, Emit, Event, Failed
from mstar.testing.drive import collect
from mstar.testing.examples import Example, task_for

FAKE = "fake_worker:FakeWorker"


def fake_config(key: str = "fake", **options: Any) -> WorkerConfig:
    return WorkerConfig(key=key, weights=None, deployment=merge_deployment(key, {"model_kwargs": options}))


class Listener:
    """Hears what an executor says. *patience*: seconds that :meth:`until` waits."""

    patience = 10.0
    executor: Any

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.phases: list[Phase] = []
        self._changed = asyncio.Event()

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events[event.id].append(event)
        self._changed.set()

    def _phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        self._changed.set()

    async def until(self, condition: Any) -> None:
        """Wait until *condition()* holds; it is looked at after every event and phase."""
        async with asyncio.timeout(self.patience):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def ended(self, request: str) -> bool:
        events = self.events[request]
        return bool(events) and isinstance(events[-1], Done | Failed)

    async def end(self, request: str) -> Done | Failed:
        await self.until(lambda: self.ended(request))
        event = self.events[request][-1]
        assert isinstance(event, Done | Failed)
        return event


class Layout(Listener):
    """A model by its deployment, in processes, as the server runs it; what it says is taken at once.

    :param executor: what the executor is made with.
    """

    patience = 60.0

    def __init__(
        self,
        key: str,
        weights: Path | None,
        plugins: Sequence[str],
        overrides: Mapping[str, Any],
        **executor: Any,
    ):
        super().__init__()
        registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=tuple(plugins))))
        self.spec = registry.model(key)
        config = WorkerConfig(
            key=key,
            weights=None if weights is None else str(weights),
            deployment=merge_deployment(key, packaged_deployment(self.spec), overrides),
            extra_plugins=tuple(plugins),
            plugins=(),
        )
        self.executor = processes(config, self._take, self._phase, registry, **executor)
        self.processor = load_object(self.spec.processor)(ProcessorContext(self.spec, weights, self.spec.options()))

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Emit):
                self.executor.ack(event.id, event.stream, 1)
        super()._take(events)

    def submit(self, name: str, example: Example, **task: Any) -> None:
        prepared = self.processor.prepare(task_for(self.spec, example, live=example.live or (), **task), name)
        self.executor.submit(prepared.request)

    async def said(self, name: str) -> dict[str, Any]:
        """All that *name* was answered, by stream, once it has ended as it should."""
        end = await self.end(name)
        assert isinstance(end, Done), end
        return collect([event for event in self.events[name] if isinstance(event, Emit)])


class Driver(Listener):
    """One executor over the fake worker. *how*: ``inline`` or ``processes``."""

    executor: SingleWorkerExecutor

    def __init__(self, how: str, config: WorkerConfig, **limits: Any):
        super().__init__()
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

    async def __aenter__(self) -> Driver:
        await self.executor.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.executor.stop()

    def data(self, request: str) -> list[Any]:
        return [event.data for event in self.events[request] if isinstance(event, Emit)]

    @property
    def phase_names(self) -> list[str]:
        return [phase.name for phase in self.phases]
