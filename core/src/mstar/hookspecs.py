"""Every hook of M*, in one place.

A plugin is a distribution with an entry point in group ``mstar.plugins`` that names a light module (nothing in it may
import torch at import time). The module implements any of these functions with ``@mstar.hookimpl``. pluggy passes only
the arguments that an implementation names, so arguments may be added here without breaking anyone.

Every plugin that implements a hook is called; what they return is joined. The docstring of each hook says what the
return value means, when it is called, and in which process. ``docs/hooks.md`` is made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mstar.cli.commands import Commands
    from mstar.registry import Registry
    from mstar.spec.finding import Finding
    from mstar.spec.model import ModelSpec
    from mstar.spec.request import Done, EngineRequest, Failed

HOOK_API = 1
"""The version of the hooks' contract. It grows when a hook changes in a way that old plugins do not survive. A plugin
may set ``MSTAR_HOOK_API`` to the version that it was written for; a later one than this is refused."""

hookspec = pluggy.HookspecMarker("mstar")
hookimpl = pluggy.HookimplMarker("mstar")


# --- what a plugin provides


@hookspec
def mstar_models() -> Sequence[ModelSpec]:  # type: ignore[empty-body]
    """The models that this plugin serves.

    Called once in every process that builds a registry (command line, API, worker). Return data only, with
    ``"module:Class"`` strings for what needs torch. A key that another plugin has already puts this plugin aside."""


@hookspec
def mstar_resources() -> dict[str, str]:  # type: ignore[empty-body]
    """Resource kinds: ``{kind: "module:Class"}`` of :class:`mstar.resources.base.Resource` subclasses.

    Called once in every process; a class is imported by the worker whose model asks for its kind."""


@hookspec
def mstar_attention_backends() -> dict[str, str]:  # type: ignore[empty-body]
    """Attention implementations: ``{name: "module:Class"}`` of :class:`mstar.resources.attention.AttentionBackend`.

    Called once in every process; workers import all of them. The first backend, in order of its ``priority``, that
    supports a resource's needs is used; one that cannot be imported is logged and left out."""


@hookspec
def mstar_engines() -> dict[str, str]:  # type: ignore[empty-body]
    """Ways to run a node's step: ``{name: "module:Class"}`` of :class:`mstar.engine.base.Runner`.

    Called once in every process; a worker imports the one that its deployment names (``engine.runner``)."""


@hookspec
def mstar_schedulers() -> dict[str, str]:  # type: ignore[empty-body]
    """Scheduling policies: ``{name: "module:Class"}`` of :class:`mstar.scheduler.base.Scheduler`.

    Called once in every process; a worker imports the one that its deployment names (``scheduler.policy``)."""


@hookspec
def mstar_executors() -> dict[str, str]:  # type: ignore[empty-body]
    """How workers are started and reached: ``{name: "module:Class"}`` of :class:`mstar.cluster.base.Executor`.

    Called once in every process; the API process imports the one that the deployment names (``executor``)."""


@hookspec
def mstar_weight_sources() -> dict[str, str]:  # type: ignore[empty-body]
    """Where weights come from: ``{name: "module:Class"}`` of :class:`mstar.weights.sources.WeightSource`.

    Called once in every process; the one that resolves weights (API process, command line) imports what a model's
    ``WeightsRef`` names."""


@hookspec
def mstar_api(registry: Registry) -> Sequence[Any]:  # type: ignore[empty-body]
    """Routers to mount: ``fastapi.APIRouter`` objects.

    Called once by the server, in the API process, when its application is built. A route finds the running models at
    ``request.app.state.mstar``. A path that the server has too is the plugin's."""


@hookspec
def mstar_openai(spec: ModelSpec) -> dict[str, str]:  # type: ignore[empty-body]
    """Adapters from an OpenAI route to a task: ``{ability: "module:Class"}`` for *spec*'s abilities.

    Called by the server, in the API process, once for each model that it serves. Return an empty dict for models that
    are not yours; a family's adapter wins over the server's own for the same ability. An adapter is built with the spec
    and the server's options and asked for ``tasks(body)``; where requests carry files, for ``tasks(body, media)``, with
    the decoded files by their place. One that has ``check(body)`` too is asked that first, so that no file is decoded
    for a request that it refuses in any case."""


@hookspec
def mstar_cli(commands: Commands) -> None:
    """Add sub-commands to ``mstar``: *commands* takes them.

    Called when the command line is parsed, whatever the command: import what a command needs inside the command."""


@hookspec
def mstar_doctor() -> Sequence[Finding]:  # type: ignore[empty-body]
    """What of this machine the plugin's models need beside what pip installs with it: a library of the system, a
    program, data. One :class:`mstar.spec.finding.Finding` each, also for what is there; ``missing`` says in its
    ``detail`` what does not work without, and in ``advice`` what to type.

    Called by ``mstar doctor`` only, in its own process: look inside the function, not when the plugin is imported, and
    load no model."""


# --- observers: a worker tells what happens. They return nothing, and what they raise costs no request.


@hookspec
def mstar_request_submitted(request: EngineRequest) -> None:
    """A request has been accepted into the queue. Called in the worker process, first of all that concerns it."""


@hookspec
def mstar_request_refused(request: EngineRequest, event: Failed) -> None:
    """A request has not been accepted (it cannot be served, the queue is full…); *event* tells the client why.

    Called in the worker process, instead of every other hook for that request."""


@hookspec
def mstar_request_started(request: EngineRequest, queued_s: float) -> None:
    """A request has been admitted: its resources are reserved. It waited *queued_s* seconds.

    Called in the worker process, before the first step that works on it. Not called for a request that ended while it
    waited."""


@hookspec
def mstar_request_ended(request: EngineRequest, event: Done | Failed) -> None:
    """A request has ended, well or not, and holds nothing any more; *event* is the last that its client gets.

    Called in the worker process, once for every submitted request, after everything else that concerns it."""


@hookspec
def mstar_step_done(node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
    """One step has run: *rows* requests together, *tokens* items, in *seconds* of the host's time.

    Called in the worker process for every step that succeeded, before its outputs reach the requests: it must be quick.
    A step that fails is not told; its requests end as ``Failed``."""
