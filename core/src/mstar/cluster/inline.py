"""The worker as a thread of this process: for the offline API, notebooks and tests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from mstar.cluster.base import Phase
from mstar.cluster.single import SingleWorkerExecutor
from mstar.cluster.transport import Command, PhaseReport, Report, Stop, WorkerFailed
from mstar.cluster.worker_loop import Pulse, Steppable, run_worker
from mstar.registry import load_object
from mstar.spec.errors import FaultFound, SetupError

__all__ = ["InlineExecutor"]

_log = logging.getLogger(__name__)


class InlineExecutor(SingleWorkerExecutor):
    """Runs the worker in a thread. Arrays are passed by reference.

    A worker that dies of an exception stays ``failed``: the state that it shared with this process cannot be trusted,
    so nothing is restarted.
    """

    in_process = True
    _thread: threading.Thread | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._channel = _ThreadChannel(self._loop, self._receive)
        self._thread = threading.Thread(target=self._run, name=f"mstar-worker-{self.config.key}", daemon=True)
        self._thread.start()
        try:
            await self._ready
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def stop(self) -> None:
        thread, self._thread = self._thread, None  # a start that is cancelled stops too: once
        if thread is not None:
            self._channel.commands.put([Stop()])
            while thread.is_alive():  # a step cannot be interrupted: wait for it without blocking the loop
                await asyncio.sleep(0.002)
            self._channel.drain()
        self._lose_worker(Phase(name="stopped"), "the server is shutting down", "shutting_down")

    def _send(self, commands: list[Command]) -> None:
        self._channel.commands.put(commands)

    def _on_failure(self, report: WorkerFailed) -> None:
        super()._on_failure(report)
        self._lose_worker(Phase(name="failed", detail=report.message), report.message, "worker_died")

    def _run(self) -> None:
        """The worker's whole life, in its own thread."""
        channel, key = self._channel, self.config.key
        try:
            worker: Steppable = load_object(self.worker_factory)(self.config, self.registry, channel.report_phase)
        except SetupError as error:
            channel.send([WorkerFailed(message=str(error), setup=not isinstance(error, FaultFound))])
            return
        except Exception as error:
            _log.exception("the worker of %r could not be built", key)
            channel.send([WorkerFailed(message=f"the worker of {key!r} could not be built: {_sentence(error)}")])
            return
        channel.report_phase(Phase(name="ready"))
        try:
            run_worker(worker, channel, Pulse())
        except Exception as error:
            _log.exception("the worker of %r died", key)
            channel.send([WorkerFailed(message=f"the worker of {key!r} died: {_sentence(error)}")])
        finally:
            self._close(worker)

    def _close(self, worker: Steppable) -> None:
        try:
            worker.close()
        except Exception:  # of a device that is lost, say: what ended the worker has been told
            _log.exception("the worker of %r could not be closed", self.config.key)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _ThreadChannel:
    """The worker thread's end: a queue in; out, one callback on the event loop for all reports not yet delivered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Report]], None]):
        self.commands: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self._loop, self._deliver = loop, deliver
        self._reports: list[Report] = []
        self._lock = threading.Lock()

    def receive(self, timeout: float | None) -> Sequence[Command]:
        commands: list[Command] = []
        try:
            if timeout != 0:
                commands.extend(self.commands.get(timeout=timeout))
            while not self.commands.empty():  # this thread is the only reader
                commands.extend(self.commands.get_nowait())
        except queue.Empty:
            pass  # the wait is over
        return commands

    def send(self, reports: list[Report]) -> None:
        with self._lock:
            scheduled = bool(self._reports)
            self._reports.extend(reports)
        if not scheduled:
            try:
                self._loop.call_soon_threadsafe(self.drain)
            except RuntimeError:  # the loop was closed without stop(): nobody is left to serve
                self.commands.put([Stop()])

    def report_phase(self, phase: Phase) -> None:
        self.send([PhaseReport(phase=phase)])

    def drain(self) -> None:
        """Deliver all reports. On the event loop."""
        with self._lock:
            reports, self._reports = self._reports, []
        if reports:
            self._deliver(reports)
