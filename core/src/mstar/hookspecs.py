"""Every hook of M*, in one place.

A plugin is a distribution with an entry point in group ``mstar.plugins`` that names a light module (nothing in it may
import torch at import time). The module implements any of these functions with ``@mstar.hookimpl``. pluggy passes only
the arguments that an implementation names, so arguments may be added here without breaking anyone.

Hooks that return lists are called on every plugin and their results are joined; the observers return nothing. The
docstring of each says when it is called, in which process, and what the return value means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.spec.model import ModelSpec
    from mstar.spec.request import EngineRequest

hookspec = pluggy.HookspecMarker("mstar")
hookimpl = pluggy.HookimplMarker("mstar")


@hookspec
def mstar_models() -> Sequence[ModelSpec]:  # type: ignore[empty-body]
    """The models that this plugin serves. Called once, in every process, when the registry is built: return data only,
    with ``"module:Class"`` strings for what needs torch."""


@hookspec
def mstar_resources() -> dict[str, str]:  # type: ignore[empty-body]
    """Resource kinds: ``{kind: "module:Class"}`` of :class:`mstar.resources.base.Resource` subclasses. Called in
    workers."""


@hookspec
def mstar_attention_backends() -> dict[str, str]:  # type: ignore[empty-body]
    """Attention implementations: ``{name: "module:Class"}`` of :class:`mstar.resources.attention.AttentionBackend`.
    Called in workers; the first backend, in order of its ``priority``, that supports a resource's needs is used."""


@hookspec
def mstar_engines() -> dict[str, str]:  # type: ignore[empty-body]
    """Ways to run a node's step: ``{name: "module:Class"}`` of :class:`mstar.engine.base.Runner`. Called in workers."""


@hookspec
def mstar_schedulers() -> dict[str, str]:  # type: ignore[empty-body]
    """Scheduling policies: ``{name: "module:Class"}`` of :class:`mstar.scheduler.base.Scheduler`. Called in workers."""


@hookspec
def mstar_executors() -> dict[str, str]:  # type: ignore[empty-body]
    """How workers are started and reached: ``{name: "module:Class"}`` of :class:`mstar.cluster.base.Executor`. Called
    in the API process."""


@hookspec
def mstar_weight_sources() -> dict[str, str]:  # type: ignore[empty-body]
    """Where weights come from: ``{name: "module:Class"}`` of :class:`mstar.weights.sources.WeightSource`. Called in the
    process that resolves weights: the API process."""


@hookspec
def mstar_api(registry: Registry) -> Sequence[Any]:  # type: ignore[empty-body]
    """Routers to mount: ``fastapi.APIRouter`` objects. Called once by the server when its application is built. A route
    finds the running models at ``request.app.state.mstar``."""


@hookspec
def mstar_openai(spec: ModelSpec) -> dict[str, str]:  # type: ignore[empty-body]
    """Adapters from an OpenAI route to a task: ``{ability: "module:Class"}`` for *spec*'s abilities. Called by the
    server when a model is registered; a family's adapter wins over the server's own for the same ability."""


@hookspec
def mstar_cli(commands: Any) -> None:
    """Add sub-commands. *commands* is a :class:`mstar.cli.app.Commands`; called when the command line is parsed, so
    import what a command needs inside the command."""


@hookspec
def mstar_request_submitted(request: EngineRequest) -> None:
    """A request has been accepted into the queue. Worker process."""


@hookspec
def mstar_request_started(request: EngineRequest, queued_s: float) -> None:
    """A request has been admitted: its resources are reserved. Worker process."""


@hookspec
def mstar_request_ended(request: EngineRequest, event: Any) -> None:
    """A request has ended and holds nothing any more; *event* is its ``Done`` or ``Failed``. Worker process."""


@hookspec
def mstar_step_done(node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
    """One step has run. Worker process; called for every step, so an implementation must be quick. As with all
    observers, what it raises is logged and changes nothing."""
