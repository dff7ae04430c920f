"""One actor seen from its executor: what a child process is to :mod:`mstar.cluster.processes`.

::

    executor (event loop)                            actor (mstar.cluster.ray.actor)
        │── commands ──▶  ZeroMQ pair, TCP, encrypted ──▶ │  thread `run`: commands, step, events
        │◀─ reports ────  (one node: ipc)              ── │
        │── age? ───────▶  Ray                        ──▶ │  thread `watch`: age of the step that runs
        │◀─ end of run() ─ Ray: it died, its node is lost │
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from ray.exceptions import ActorDiedError, RayError, RayTaskError

import mstar
from mstar.cluster.base import Phase, WorkerConfig
from mstar.cluster.connection import Attached, Connection, encrypt, open_socket
from mstar.cluster.launch import Job, encode_job
from mstar.cluster.ray.actor import Where
from mstar.cluster.ray.group import Group
from mstar.cluster.shm import Arena
from mstar.cluster.transport import Command, PhaseReport, Report, Stop, WorkerFailed
from mstar.log_format import log_format

__all__ = ["RemoteWorker"]

_DYING_S = 15.0
_log = logging.getLogger(__name__)


class RemoteWorker(Attached):
    """One life of the actor of *config*'s rank, from being told its job to its death.

    :param deliver: called on the running event loop with what it reports. :param link: see
        :class:`~mstar.cluster.launch.Job`. :param beat_s: seconds between two questions whether it lives.
    """

    def __init__(
        self,
        group: Group,
        config: WorkerConfig,
        factories: tuple[str, str],
        beat_s: float,
        deliver: Callable[[Sequence[Report]], None],
        link: str | None,
    ):
        self._group, self._config, self._deliver, self._link = group, config, deliver, link
        self._worker_factory, self._registry_factory = factories
        self._beat_s = beat_s
        self.exited, self.step_age = asyncio.Event(), 0.0
        self._sign_of_life = time.monotonic()
        self._arena = Arena.create()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: Connection | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._where: Where | None = None
        self._end = ""
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._life = self._loop.create_task(self._live())
        self._beats = self._loop.create_task(self._ask())

    # --- its life -----------------------------------------------------------------------------------------------------
    async def _live(self) -> None:
        rank = self._config.rank
        self._deliver([PhaseReport(phase=Phase(name="starting", detail="waiting for Ray to start the worker"))])
        try:
            self._where = where = await self._group.where(rank, str(self._arena.path))
            if where.version != mstar.__version__:
                self._end = f"there is M* {where.version} on {where.host}, and {mstar.__version__} here"
                self._deliver([WorkerFailed(message=f"rank {rank}: {self._end}", setup=True)])
                return
            job = self._connect(where)
            await self._group.run(rank, encode_job(job))
            self._end = "it was ended"
        except Exception as error:
            self._end = self._end or self._cause(error)
        finally:
            self.exited.set()

    def _connect(self, where: Where) -> Job:
        """Open this end of the socket. Returns what the worker is to be told."""
        socket = open_socket(self._context)
        if where.sees:
            address, key = f"ipc://{self._arena.path / 'socket'}", ""
            socket.bind(address)
        else:
            key = encrypt(socket)
            host = f"tcp://{self._group.host}"
            address = f"{host}:{socket.bind_to_random_port(host)}"
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._lost)
        self._connection = Connection(socket, self._arena if where.sees else None, self._deliver, self._unreadable)
        return Job(
            config=self._config,
            worker_factory=self._worker_factory,
            registry_factory=self._registry_factory,
            address=address,
            server_key=key,
            folder=str(self._arena.path) if where.sees else None,
            log_level=logging.getLogger().getEffectiveLevel(),
            log_form=log_format(),
            link=self._link,
        )

    def _cause(self, error: Exception) -> str:
        """How the life ended, in words."""
        host = "" if self._where is None else f" on {self._where.host}"
        if isinstance(error, RayTaskError):
            return f"its actor{host} failed: {type(error.cause).__name__}: {error.cause}"
        if isinstance(error, ActorDiedError) and self._where is None:
            return f"Ray does not start its actor again: {str(error).strip().splitlines()[-1].strip()}"
        if isinstance(error, RayError):
            return (
                f"its actor{host} is gone: the process was killed (out of memory?) or has crashed, or its node is lost"
            )
        return f"{type(error).__name__}: {error}"

    def _lost(self) -> None:
        """The other end of the socket is gone: its process has ended, as Ray will tell, or cannot be reached."""
        if self._monitor is None or not int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        self._loop.remove_reader(int(self._monitor.getsockopt(zmq.FD)))
        self.exited.set()

    def _unreadable(self) -> None:
        _log.exception("a message of rank %d cannot be read: it is ended", self._config.rank)
        self.kill()

    async def _ask(self) -> None:
        """Ask for ever whether it lives."""
        while True:
            with contextlib.suppress(RayError):  # the end of `run` says why
                self.step_age = await self._group.age(self._config.rank)
                self._sign_of_life = time.monotonic()
            await asyncio.sleep(self._beat_s)

    # --- what its executor does ---------------------------------------------------------------------------------------
    @property
    def pid(self) -> int | None:
        return None if self._where is None else self._where.pid

    @property
    def node(self) -> str | None:
        """Ray's id of the node that it is on; ``None`` while it has none."""
        return None if self._where is None else self._where.node

    def send(self, commands: list[Command]) -> list[tuple[str, str]]:
        return [] if self._connection is None else self._connection.send(commands)

    def alive(self) -> bool:
        return not self._life.done()

    def kill(self) -> None:
        if self._connection is not None and self.alive():
            self._group.kill(self._config.rank)

    def silence(self) -> float:
        return time.monotonic() - self._sign_of_life

    def read_beats(self) -> None:
        pass  # they come as answers

    def dismiss(self) -> None:
        self.kill()

    async def reap(self, grace: float) -> str:
        if grace > 0:
            await asyncio.wait([self._life], timeout=grace)
        if self.alive():
            self._end = self._end or "it was killed, having given no sign of life or lost its connection"
            self.kill()
            if self._connection is None:
                self._life.cancel()  # Ray has not even started it
            await asyncio.wait([self._life], timeout=_DYING_S)
        return self._end

    async def stop(self, grace: float) -> None:
        if not self._open:
            return
        self._open = False
        if grace > 0 and self.alive():
            self.send([Stop()])
        await self.reap(grace)
        tasks: list[asyncio.Task[Any]] = [self._beats, self._life]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self._monitor is not None:
            self._loop.remove_reader(int(self._monitor.getsockopt(zmq.FD)))
            self._monitor = None
        if self._connection is not None:
            self._connection.close()
        self._context.destroy(linger=0)
        self._arena.remove()
