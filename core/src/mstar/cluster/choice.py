"""Which executor runs the workers as processes: by how many ranks and copies the deployment has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mstar.cluster.base import Executor, Phase, WorkerConfig
from mstar.spec.placement import ranks_of
from mstar.spec.request import Event

__all__ = ["processes"]


def processes(
    config: WorkerConfig,
    sink: Callable[[Sequence[Event]], None],
    on_phase: Callable[[Phase], None] = lambda phase: None,
    registry: Any = None,
    **limits: Any,
) -> Executor:
    """The executor ``processes`` for *config*: one worker, or one for each rank of each copy of the layout.

    :param limits: see :class:`~mstar.cluster.processes.ProcessesExecutor`.
    """
    if config.deployment.replicas > 1:
        from mstar.cluster.replicas import ReplicasExecutor

        make = partial(_layout, registry=registry, limits=limits)
        return ReplicasExecutor(config, sink, on_phase, registry, make=make)
    return _layout(config, sink, on_phase, registry, limits)


def _layout(
    config: WorkerConfig,
    sink: Callable[[Sequence[Event]], None],
    on_phase: Callable[[Phase], None],
    registry: Any,
    limits: Mapping[str, Any],
) -> Executor:
    """The executor of one copy of the layout."""
    if ranks_of(config.deployment.placement) > 1:
        from mstar.cluster.ranks import RanksExecutor

        return RanksExecutor(config, sink, on_phase, registry, **limits)
    from mstar.cluster.processes import ProcessesExecutor

    return ProcessesExecutor(config, sink, on_phase, registry, **limits)
