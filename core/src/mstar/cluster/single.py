"""What executors of one worker have in common, wherever that worker runs."""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstar.cluster.base import Executor, Phase, WorkerConfig
from mstar.cluster.transport import (
    Ack,
    AskStatus,
    Command,
    LinkBroken,
    PhaseReport,
    RankFacts,
    Report,
    StatusReport,
    WorkerFailed,
)
from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.request import Cancel, Done, EngineRequest, Event, Failed, Push

__all__ = ["SingleWorkerExecutor"]

_ENDS = (Done, Failed)
_CONTROL = (PhaseReport, StatusReport, WorkerFailed)


class SingleWorkerExecutor(Executor):
    """Keeps the running requests' ids and joins the commands of one turn of the event loop into one message.

    All methods are called on the event loop that :meth:`start` ran on. A subclass implements :meth:`_send` and feeds
    what comes back to :meth:`_receive`.

    :param worker_factory: ``"module:Class"`` of the worker (:class:`mstar.worker.core.Worker`'s interface).
    """

    def __init__(
        self,
        config: WorkerConfig,
        sink: Callable[[Sequence[Event]], None],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        registry: Any = None,
        *,
        worker_factory: str = "mstar.worker.core:Worker",
    ):
        super().__init__(config, sink, on_phase, registry)
        self.worker_factory = worker_factory
        self._running: set[str] = set()
        self._outgoing: list[Command] = []
        self._questions: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None

    # --- commands ------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self._running.add(request.id)
        if self.phase.name == "ready":
            self._queue(request)
        else:
            message = f"{self.config.key!r} is not ready ({self.phase.name})"
            self._event_loop.call_soon(self._end, [request.id], message, "not_ready")

    def push(self, push: Push) -> None:
        if push.id in self._running:
            self._queue(push)

    def cancel(self, cancel: Cancel) -> None:
        if cancel.id in self._running:
            self._queue(cancel)

    def ack(self, request: str, stream: str, items: int) -> None:
        if request in self._running:
            self._queue(Ack(request=request, stream=stream, items=items))

    async def status(self) -> Mapping[str, Any]:
        """The worker's own status; an empty mapping while no worker runs."""
        if self.phase.name != "ready":
            return {}
        number = next(self._numbers)
        answer = self._questions[number] = self._event_loop.create_future()
        self._queue(AskStatus(number=number))
        try:
            status: Mapping[str, Any] = await answer
            return status
        finally:
            self._questions.pop(number, None)

    @property
    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the executor has not been started")
        return self._loop

    def _queue(self, command: Command) -> None:
        if not self._outgoing:
            self._event_loop.call_soon(self._flush)
        self._outgoing.append(command)

    def _flush(self) -> None:
        commands, self._outgoing = self._outgoing, []
        if commands:
            self._send(commands)

    @abc.abstractmethod
    def _send(self, commands: list[Command]) -> None:
        """Send *commands* to the worker as one message; dropped when it has just died."""

    # --- reports -------------------------------------------------------------------------------------------------

    def _receive(self, reports: Sequence[Report]) -> None:
        """Take what the worker sent, in order."""
        events: list[Event] = []
        for report in reports:
            if isinstance(report, _CONTROL):
                self._take_control(report)
                continue
            if isinstance(report, RankFacts | LinkBroken):
                continue  # of a layout with several ranks, whose executor has taken them
            if report.id not in self._running:
                continue  # it has been failed here (see _end): its end has been told
            if isinstance(report, _ENDS):
                self._running.discard(report.id)
            events.append(report)
        if events:
            self.sink(events)

    def _take_control(self, report: PhaseReport | StatusReport | WorkerFailed) -> None:
        match report:
            case PhaseReport():
                self._set_phase(report.phase)
            case StatusReport():
                answer = self._questions.get(report.number)
                if answer is not None and not answer.done():
                    answer.set_result(report.status)
            case WorkerFailed():
                self._on_failure(report)

    def _on_failure(self, report: WorkerFailed) -> None:
        """The worker is ending. Here: tell a waiting :meth:`start`."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception((SetupError if report.setup else FaultFound)(report.message))

    def _set_phase(self, phase: Phase) -> None:
        if phase.name == "ready" and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        if phase != self.phase:
            self.phase = phase
            self.on_phase(phase)

    def _lose_worker(self, phase: Phase, message: str, code: str) -> None:
        """There is no worker any more: enter *phase* and end whatever waited for it."""
        self._outgoing = []
        self._set_phase(phase)
        self._end(sorted(self._running), message, code)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result({})

    def _end(self, ids: Sequence[str], message: str, code: str) -> None:
        gone = [i for i in ids if i in self._running]
        self._running.difference_update(gone)
        if gone:
            self.sink([Failed(id=i, message=message, code=code, status=503, retry_after=5.0) for i in gone])
