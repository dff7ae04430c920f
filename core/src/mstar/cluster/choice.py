"""Which executor runs the workers as processes: by how many ranks and copies the deployment has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mstar.cluster.base import Executor, Phase, WorkerConfig
from mstar.spec.placement import ranks_of
from mstar.spec.request import Event

__all__ = ["copied", "processes"]

Sink = Callable[[Sequence[Event]], None]
Told = Callable[[Phase], None]
Layout = Callable[[WorkerConfig, Sink, Told], Executor]
"""Makes the executor of one copy of a deployment's layout."""


def processes(
    config: WorkerConfig, sink: Sink, on_phase: Told = lambda phase: None, registry: Any = None, **limits: Any
) -> Executor:
    """The executor ``processes`` for *config*: one worker, or one for each rank of each copy of the layout.

    :param limits: see :class:`~mstar.cluster.processes.ProcessesExecutor`.
    """
    return copied(partial(_layout, registry=registry, limits=limits), config, sink, on_phase, registry)


def copied(layout: Layout, config: WorkerConfig, sink: Sink, on_phase: Told, registry: Any) -> Executor:
    """What *layout* makes, as many times as *config* wants replicas."""
    if config.deployment.replicas > 1:
        from mstar.cluster.replicas import ReplicasExecutor

        return ReplicasExecutor(config, sink, on_phase, registry, make=layout)
    return layout(config, sink, on_phase)


def _layout(config: WorkerConfig, sink: Sink, on_phase: Told, registry: Any, limits: Mapping[str, Any]) -> Executor:
    """The executor of one copy of the layout."""
    if ranks_of(config.deployment.placement) > 1:
        from mstar.cluster.ranks import RanksExecutor

        return RanksExecutor(config, sink, on_phase, registry, **limits)
    from mstar.cluster.processes import ProcessesExecutor

    return ProcessesExecutor(config, sink, on_phase, registry, **limits)
