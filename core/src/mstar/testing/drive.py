"""Drives a worker by hand: for tests of models and of the core, without threads, sockets or clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mstar.cluster.base import WorkerConfig
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.knobs import validate_knobs
from mstar.spec.processor import Prepared, ProcessorContext
from mstar.spec.request import Cancel, Done, Emit, Event, Failed, Push
from mstar.spec.tasks import GenerateTask
from mstar.testing.miniatures import Example, Miniature
from mstar.worker.core import Worker

__all__ = ["Driver", "collect", "miniature_registry"]


def miniature_registry() -> Registry:
    """A registry of the installed plugins and the miniatures."""
    return Registry(load_plugins(Settings(extra_plugins=("mstar.testing.miniatures",))))


def collect(events: list[Emit]) -> dict[str, Any]:
    """What each stream carried, joined: a list of ids for tokens, else one array."""
    parts: dict[str, list[Any]] = {}
    for event in sorted(events, key=lambda e: e.seq):
        parts.setdefault(event.stream, []).append(event.data)
    return {
        name: [i for part in pieces for i in part] if isinstance(pieces[0], list) else np.concatenate(pieces)
        for name, pieces in parts.items()
    }


class Driver:
    """A worker of one miniature, its processor, and the events of every request so far.

    :param overrides: fields of the deployment file.
    """

    def __init__(self, mini: Miniature, registry: Registry | None = None, **overrides: Any):
        self.mini, self.registry = mini, registry or miniature_registry()
        deployment = merge_deployment(mini.key, dict(mini.spec.deployment), overrides)  # type: ignore[arg-type]
        self.worker = Worker(WorkerConfig(key=mini.key, weights=None, deployment=deployment), self.registry)
        self.processor = load_object(mini.spec.processor)(ProcessorContext(mini.spec, None))
        self.emitted: dict[str, list[Emit]] = {}
        self.ended: dict[str, Done | Failed] = {}
        self.ack = True

    def prepare(self, request: str, example: Example, **task: Any) -> Prepared:
        knobs = validate_knobs(self.mini.knobs, dict(example.knobs))
        live = self.mini.live
        given = GenerateTask(knobs=knobs, text=example.text, want=example.want, live=live, **task)
        prepared: Prepared = self.processor.prepare(given, request)
        return prepared

    def submit(self, request: str, example: Example, **task: Any) -> None:
        """Submit *example*; what its client sends during the request follows at once."""
        self.worker.submit(self.prepare(request, example, **task).request)
        for stream, items in example.appends:
            self.worker.push(Push(id=request, stream=stream, data=items))
        for stream in self.mini.live:
            self.worker.push(Push(id=request, stream=stream, end=True))

    def cancel(self, request: str) -> None:
        self.worker.cancel(Cancel(id=request))

    def take(self) -> list[Event]:
        """Collect the worker's events, acknowledging emissions as a reading client would."""
        events = self.worker.events()
        for event in events:
            if isinstance(event, Emit):
                self.emitted.setdefault(event.id, []).append(event)
                if self.ack:
                    self.worker.ack(event.id, event.stream, 1)
            else:
                assert event.id not in self.ended, f"{event.id} ended twice"
                self.ended[event.id] = event
        return events

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 100_000) -> None:
        """Step until nothing is ready, or *until* holds."""
        for _ in range(most):
            progressed = self.worker.step()
            self.take()
            if not progressed and not self.worker.scheduler.waiting:
                return
            if until():
                return
        raise AssertionError(f"the worker did not come to rest in {most} steps")

    def result(self, request: str) -> Mapping[str, Any]:
        """What the streams of a request that ended well carried."""
        end = self.ended[request]
        assert isinstance(end, Done), end
        return collect(self.emitted.get(request, []))

    def assert_empty(self) -> None:
        """Every pool is empty and its books balance (promise P4)."""
        self.worker.sessions.close()
        self.worker.check()
        for name, resource in self.worker.resources.items():
            assert resource.usage().used == 0, f"{name} still holds {resource.usage()}"
