"""The worker as a process of its own, watched and restarted.

::

    executor (event loop)                         worker process (mstar.cluster.child)
        │── commands ──▶  ZeroMQ pair, ipc  ──▶ │  main thread: commands, step, events
        │◀─ reports ────                      ── │
        │◀─ heartbeats ──  pipe              ── │  heartbeat thread: age of the step that runs
        │── start line ─▶ stdin, kept open   ──▶ │  watch thread: end of file = the executor has died

A worker counts as dead when its process has ended, when no heartbeat has come for *silence_limit_s*, or when one step
runs for longer than *step_limit_s* (promise P8).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.connection import Attached
from mstar.cluster.launch import launch
from mstar.cluster.single import SingleWorkerExecutor
from mstar.cluster.transport import Command, Report, WorkerFailed
from mstar.spec.errors import FaultFound, SetupError
from mstar.spec.request import Done, Event

__all__ = ["LONGEST_DELAY_S", "STABLE_S", "ProcessesExecutor", "down"]

STABLE_S = 60.0  # a worker that ran for so long did not die of its start
LONGEST_DELAY_S = 30.0
_log = logging.getLogger(__name__)


def down(cause: str) -> Phase:
    """The phase of a worker that has ended, or did not come up, until the next start."""
    return Phase(name="failed", detail=f"{cause}; it is started again")


class ProcessesExecutor(SingleWorkerExecutor):
    """Runs the worker in one child process and starts it anew when it dies.

    :param registry_factory: ``"module:function"`` that builds the worker's registry from its
        :class:`~mstar.cluster.base.WorkerConfig`, in the child.
    :param silence_limit_s: longest time without a heartbeat (a stopped process, a step that holds the interpreter's
        lock).
    :param step_limit_s: longest time that one step may take.
    :param restart_delay_s: pause before the first restart; doubled with every failure in a row, up to 30 s. A worker
        that has completed a request, or lived for a minute, did not fail in a row with the one before.
    :param stop_grace_s: how long :meth:`stop` waits for the worker to end by itself.
    """

    def __init__(
        self,
        config: WorkerConfig,
        sink: Callable[[Sequence[Event]], None],
        on_phase: Callable[[Phase], None] = lambda phase: None,
        registry: Any = None,
        *,
        worker_factory: str = "mstar.worker.core:Worker",
        registry_factory: str = "mstar.cluster.child:build_registry",
        silence_limit_s: float = 60.0,
        step_limit_s: float = 600.0,
        restart_delay_s: float = 0.5,
        stop_grace_s: float = 2.0,
    ):
        super().__init__(config, sink, on_phase, registry, worker_factory=worker_factory)
        self.registry_factory = registry_factory
        self.silence_limit_s, self.step_limit_s = silence_limit_s, step_limit_s
        self.restart_delay_s, self.stop_grace_s = restart_delay_s, stop_grace_s
        self._tick_s = min(1.0, silence_limit_s / 4, step_limit_s / 4)
        self._failures = 0  # in a row
        self._child: Attached | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._last_words = ""

    @property
    def pid(self) -> int | None:
        """The worker's process id, ``None`` while there is none."""
        return self._child.pid if self._child is not None else None

    @property
    def _restarted(self) -> str:
        """What is started again when the worker has died, in words."""
        return self.config.name

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._launch()
        except SetupError as error:
            self._lose_worker(Phase(name="failed", detail=str(error)), str(error), "worker_died")
            raise
        self._supervisor = self._loop.create_task(self._supervise())

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        if self._child is not None:
            await self._child.stop(self.stop_grace_s)
            self._child = None
        self._lose_worker(Phase(name="stopped"), "the server is shutting down", "shutting_down")

    def _send(self, commands: list[Command]) -> None:
        if self._child is None:
            return  # its requests have been ended already
        for request, message in self._child.send(commands):
            self._end([request], message, "internal_error")

    def _receive(self, reports: Sequence[Report]) -> None:
        if self._failures and any(type(report) is Done for report in reports):
            self._failures = 0
        super()._receive(reports)

    def _on_failure(self, report: WorkerFailed) -> None:
        self._last_words = report.message
        super()._on_failure(report)
        if self._child is not None:
            self._child.dismiss()

    def _attach(
        self,
        config: WorkerConfig,
        factory: str,
        deliver: Callable[[Sequence[Report]], None],
        link: str | None = None,
    ) -> Attached:
        """Start the worker of *config*. *link*: see :class:`~mstar.cluster.launch.Job`."""
        return launch(config, factory, self.registry_factory, self._tick_s, deliver, link)

    async def _launch(self) -> None:
        """Start a child and wait until it is ready. Raises SetupError, and then leaves nothing behind."""
        self._last_words = ""
        self._set_phase(Phase(name="starting"))
        ready = self._ready = self._event_loop.create_future()
        try:
            child = self._attach(self.config, self.worker_factory, self._receive)
        except OSError as error:  # no memory, no descriptors, no space: may pass, so a restart tries again
            raise SetupError(f"the process of {self.config.name} cannot be started: {error}") from error
        self._child = child
        exited = self._event_loop.create_task(child.exited.wait())
        try:
            await asyncio.wait([ready, exited], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                cause = await child.reap(0.0)
                message = self._last_words or f"{self.config.name} ended while starting: {cause}"
                ready.set_exception(FaultFound(message))
            ready.result()
        except BaseException:
            self._child = None
            await child.stop(0.0)
            raise
        finally:
            exited.cancel()

    async def _supervise(self) -> None:
        """Wait for the worker's death, tell everyone, start it again; for ever."""
        while True:
            child = self._child
            assert child is not None  # _launch has set it
            began = time.monotonic()
            cause = await self._wait_dead(child)
            cause = self._last_words or f"{self.config.name} died: {cause}"
            _log.error("%s; it is restarted", cause)
            self._child = None
            self._lose_worker(down(cause), cause, "worker_died")
            await child.stop(0.0)
            self._failures = 1 if time.monotonic() - began > STABLE_S else self._failures + 1
            await self._restart()

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(min(self.restart_delay_s * 2 ** min(self._failures - 1, 16), LONGEST_DELAY_S))
            try:
                return await self._launch()
            except SetupError as error:
                self._failures += 1
                _log.error("%s could not be restarted: %s", self._restarted, error)
                self._set_phase(down(str(error)))

    async def _wait_dead(self, child: Attached) -> str:
        """Returns why *child* is dead, once it is. A child that hangs is killed."""
        while True:
            try:
                await asyncio.wait_for(child.exited.wait(), self._tick_s)
            except TimeoutError:
                hang = self._hang(child)
                if hang is None and child.alive():
                    continue
                return hang or await child.reap(0.0)
            # Its pipe is closed; the process follows in a moment.
            return await child.reap(self.stop_grace_s)

    def _hang(self, child: Attached) -> str | None:
        child.read_beats()  # what came while this loop was busy itself
        silence, step_age = child.silence(), child.step_age
        if silence > self.silence_limit_s:
            return f"no sign of life for {silence:.0f} s"
        if step_age > self.step_limit_s:
            return f"one step has been running for {step_age:.0f} s"
        return None
