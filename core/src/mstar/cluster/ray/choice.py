"""Which executor runs the workers on Ray: by how many ranks and copies the deployment has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from mstar.cluster.base import Executor, WorkerConfig
from mstar.cluster.choice import Sink, Told, copied
from mstar.spec.errors import SetupError
from mstar.spec.placement import ranks_of

try:
    import_module("ray")  # here, since `mstar check` imports this module, too
except ImportError as error:
    raise SetupError(f"executor 'ray' needs Ray ({error}); run `pip install 'mstar-core[ray]'`") from error

__all__ = ["ray_actors"]


def ray_actors(
    config: WorkerConfig, sink: Sink, on_phase: Told = lambda phase: None, registry: Any = None, **limits: Any
) -> Executor:
    """The executor ``ray`` for *config*: an actor for each rank of each copy of the layout.

    :param limits: see :class:`~mstar.cluster.processes.ProcessesExecutor`.
    """
    return copied(partial(_layout, registry=registry, limits=limits), config, sink, on_phase, registry)


def _layout(config: WorkerConfig, sink: Sink, on_phase: Told, registry: Any, limits: Mapping[str, Any]) -> Executor:
    """The executor of one copy of the layout."""
    from mstar.cluster.ray.executor import RayExecutor, RayRanksExecutor

    kind = RayRanksExecutor if ranks_of(config.deployment.placement) > 1 else RayExecutor
    return kind(config, sink, on_phase, registry, **limits)
