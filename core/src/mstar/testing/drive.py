"""Drives a worker by hand: for tests of models and of the core, without threads, sockets or clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mstar.cluster.base import WorkerConfig
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.deployment_files import packaged_deployment, packaged_layout
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.graph import CLIENT
from mstar.spec.knobs import read_options
from mstar.spec.processor import Prepared, ProcessorContext
from mstar.spec.request import Cancel, Done, Emit, Event, Failed
from mstar.testing.examples import Example, task_for
from mstar.worker.core import Worker
from mstar.worker.layout import Meshes

__all__ = ["Driver", "RestlessError", "collect", "miniature_registry"]


class RestlessError(AssertionError):
    """A worker that goes on and on."""


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


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
    """A worker of one model, its processor, and the events of every request so far.

    :param model: a registered key, or anything that has one (a :class:`~mstar.spec.model.ModelSpec`, a miniature).
    :param weights: the checkpoint's folder, for models that have weights. :param overrides: fields of the deployment.
    :param meshes: of nodes that other processes compute together with this one, which are driven alike.
    """

    def __init__(
        self,
        model: str | _Keyed,
        registry: Registry | None = None,
        weights: Path | None = None,
        meshes: Meshes | None = None,
        **overrides: Any,
    ):
        self.registry = registry or miniature_registry()
        self.spec = spec = self.registry.model(model if isinstance(model, str) else model.key)
        deployment = merge_deployment(
            spec.key, packaged_deployment(spec), packaged_layout(spec, overrides.get("layout")), overrides
        )
        folder = None if weights is None else str(weights)
        config = WorkerConfig(key=spec.key, weights=folder, deployment=deployment)
        self.worker = Worker(config, self.registry, meshes=meshes)
        context = ProcessorContext(spec, weights, read_options(spec.options, deployment.model_kwargs))
        self.processor = load_object(spec.processor)(context)
        self.client_streams = tuple(s.name for s in self.worker.plan.graph.streams_from(CLIENT))
        self.emitted: dict[str, list[Emit]] = {}
        self.ended: dict[str, Done | Failed] = {}
        self.ack = True

    def live(self, example: Example) -> tuple[str, ...]:
        """The streams that *example*'s client feeds."""
        return self.client_streams if example.live is None else example.live

    def prepare(self, request: str, example: Example, **task: Any) -> Prepared:
        given = task_for(self.spec, example, live=self.live(example), **task)
        prepared: Prepared = self.processor.prepare(given, request)
        return prepared

    def submit(self, request: str, example: Example, **task: Any) -> None:
        """Submit *example*; what its client sends during the request follows at once."""
        self.submit_prepared(self.prepare(request, example, **task), example)

    def submit_prepared(self, prepared: Prepared, example: Example) -> None:
        """Submit what the processor made of *example*."""
        request = prepared.request.id
        self.worker.submit(prepared.request)
        push = (prepared.intake or self.processor).push
        for stream, part in example.appends:
            self.worker.push(push(stream, part, request))
        for stream in self.live(example):
            self.worker.push(push(stream, None, request, end=True))

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
        raise RestlessError(f"the worker did not come to rest in {most} steps")

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
