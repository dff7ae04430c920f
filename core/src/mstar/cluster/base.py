"""How workers are started and reached."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from mstar.spec.deployment import Deployment
from mstar.spec.placement import ranks_of
from mstar.spec.request import Cancel, EngineRequest, Event, Push

__all__ = ["Executor", "Phase", "WorkerConfig"]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands.

    :param name: ``starting``, ``weights``, ``warmup``, ``ready``, ``draining``, ``failed`` or ``stopped``.
    :param progress: 0…1 within the phase, or ``None``. :param detail: a sentence for people.
    """

    name: str
    progress: float | None = None
    detail: str = ""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process needs to build its model: plain data, which travels as JSON.

    :param weights: resolved local folder, or ``None`` for a model without weights.
    :param places: where keys of the deployment stand (``"file.yaml:3"``), for what is said about them.
    :param plugins: names of the installed plugins to use; ``None`` uses all. :param block_plugins: those not to import.
    :param extra_plugins: names of modules to register beside the installed plugins.
    :param trace_plugins: print every hook call on standard error.
    :param cache: folder for what a worker may keep for its next start; ``None``: it keeps nothing there.
    :param rank: which of the layout's ranks it is. :param replica: of which copy of the layout.
    :param meeting: folder in which the processes of a mesh find each other, or ``tcp://HOST:PORT`` of one of them;
        ``None`` where there is no mesh.
    :param own_device: the process sees the GPU of its rank and no other.
    :param sharing: how many processes of the deployment share its machine; ``None``: all of them.
    """

    key: str
    weights: str | None
    deployment: Deployment
    places: Mapping[str, str] = {}
    plugins: tuple[str, ...] | None = None
    block_plugins: tuple[str, ...] = ()
    extra_plugins: tuple[str, ...] = ()
    trace_plugins: bool = False
    cache: str | None = None
    rank: int = 0
    replica: int = 0
    meeting: str | None = None
    own_device: bool = False
    sharing: int | None = None

    @property
    def place(self) -> dict[str, int]:
        """Which ``copy`` and which ``rank`` it is, where there are several."""
        found = {"copy": self.replica} if self.deployment.replicas > 1 else {}
        return {**found, "rank": self.rank} if ranks_of(self.deployment.placement) > 1 else found

    @property
    def name(self) -> str:
        """What the worker is called in messages: ``the worker of 'KEY'``; where there are several, ``rank 0 of 'KEY'``,
        ``copy 1 of 'KEY'`` or ``rank 0 of copy 1 of 'KEY'``."""
        words = [f"{kind} {number}" for kind, number in reversed(self.place.items())]
        return f"{' of '.join(words) or 'the worker'} of {self.key!r}"


class Executor(abc.ABC):
    """Starts one model's worker(s) and carries requests to them and events back.

    :param sink: called on the event loop that :meth:`start` ran on, with the events of one or more steps in order.
    :param on_phase: called on the same loop whenever the worker's phase changes.
    :param registry: the API process's registry. An executor whose worker lives in this process hands it on; worker
        processes build their own.
    :cvar in_process: the worker is a thread of this process.
    """

    in_process: ClassVar[bool] = False

    def __init__(
        self,
        config: WorkerConfig,
        sink: Callable[[Sequence[Event]], None],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        registry: Any = None,
    ):
        self.config, self.sink, self.on_phase, self.registry = config, sink, on_phase, registry
        self.phase = Phase(name="starting")

    @abc.abstractmethod
    async def start(self) -> None:
        """Start; return when the worker is ready. Raises :class:`~mstar.spec.errors.SetupError` when it cannot be."""

    @abc.abstractmethod
    def submit(self, request: EngineRequest) -> None: ...

    @abc.abstractmethod
    def push(self, push: Push) -> None: ...

    @abc.abstractmethod
    def cancel(self, cancel: Cancel) -> None: ...

    @abc.abstractmethod
    def ack(self, request: str, stream: str, items: int) -> None:
        """The client has taken *items* emissions of *stream*: the worker may produce as many more (back-pressure)."""

    @abc.abstractmethod
    async def status(self) -> Mapping[str, Any]:
        """Pools' usage, queue length, steps run…: plain data for ``/health`` and tests."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End the worker at once. Requests still running get ``Failed`` with code ``shutting_down``."""
