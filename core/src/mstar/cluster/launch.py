"""One worker process seen from its executor: starting it, talking to it, ending it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from mstar.cluster.base import WorkerConfig
from mstar.cluster.connection import Attached, Connection, open_socket
from mstar.cluster.shm import Arena
from mstar.cluster.transport import Command, Report, Stop
from mstar.log_format import LogFormat, log_format
from mstar.settings import LIBRARIES
from mstar.spec.deployment import Deployment

__all__ = ["BEAT", "Child", "Job", "Start", "decode_job", "encode_job", "launch", "worker_environment"]

BEAT = struct.Struct("d")
"""One heartbeat: seconds that the current step has run."""

# The child's import path is this process's own, as with multiprocessing's spawn; unlike spawn, this does not import the
# caller's main module again, so that scripts and notebooks need no guard.
_BOOT = (
    "import json, sys; line = sys.stdin.buffer.readline(); sys.path[:] = json.loads(line)['path']; "
    "from mstar.cluster.child import main; main(line)"
)
_log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to run, and how it reaches its executor. Travels as JSON.

    :param address: of the executor's end of the socket. :param server_key: its public key, where what passes is
        encrypted. :param folder: the :class:`~mstar.cluster.shm.Arena`; ``None`` where the worker does not see it.
    :param log_level: of the executor's root logger. :param log_form: of its lines.
    :param link: for ranks other than 0: where to wait for rank 0, a folder that both see or ``tcp://HOST``.
    """

    config: WorkerConfig
    worker_factory: str
    registry_factory: str
    address: str
    server_key: str = ""
    folder: str | None
    log_level: int
    log_form: LogFormat = "text"
    link: str | None = None


class Start(Job, frozen=True, kw_only=True):
    """The line that a child reads first.

    :param path: import path. :param folder: never ``None``. :param beats: file descriptor of the heartbeat pipe.
    :param beat_s: seconds between heartbeats.
    """

    path: list[str]
    folder: str
    beats: int
    beat_s: float


def _encode_deployment(value: Any) -> Any:
    if isinstance(value, Deployment):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be part of a worker's configuration")


def _decode_deployment(kind: type, value: Any) -> Any:
    if kind is Deployment:
        return Deployment.model_validate(value)
    raise TypeError(f"a {kind.__name__} cannot be part of a worker's configuration")


J = TypeVar("J", bound=Job)


def encode_job(job: Job) -> bytes:
    """*job* as one line."""
    return msgspec.json.encode(job, enc_hook=_encode_deployment)


def decode_job(line: bytes, kind: type[J]) -> J:
    """What :func:`encode_job` made of a *kind*."""
    return msgspec.json.decode(line, type=kind, dec_hook=_decode_deployment)


def launch(
    config: WorkerConfig,
    worker_factory: str,
    registry_factory: str,
    beat_s: float,
    deliver: Callable[[Sequence[Report]], None],
    link: str | None = None,
) -> Child:
    """Start a worker process. *deliver* is called on the running event loop with what it reports. *link*: see
    :class:`Start`."""
    arena = Arena.create()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_socket(context)
    address = f"ipc://{arena.path / 'socket'}"
    reader, writer = os.pipe()
    try:
        if zmq.has("ipc"):
            socket.bind(address)
        else:
            address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        start = Start(
            path=[os.path.abspath(entry) for entry in sys.path],
            config=config,
            worker_factory=worker_factory,
            registry_factory=registry_factory,
            address=address,
            folder=str(arena.path),
            beats=writer,
            beat_s=beat_s,
            log_level=logging.getLogger().getEffectiveLevel(),
            log_form=log_format(),
            link=link,
        )
        place = [f"{kind}-{number}" for kind, number in config.place.items()]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, "mstar-worker", config.key, *place],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            env=worker_environment(config.deployment.engine.threads, os.environ),
        )
        child = Child(process, arena, context, socket, reader, deliver)
    except BaseException:
        os.close(reader)
        context.destroy(linger=0)
        arena.remove()
        raise
    finally:
        os.close(writer)
    child.write_line(encode_job(start))
    return child


_SPINS = "10000"
"""How often an idle OpenMP thread looks for work before it sleeps (libgomp; its own default is far more).

A step is hundreds of short parallel regions. With the default, one busy neighbour on two cores makes each of them wait
for a thread that was preempted while it spun: a token took 980 ms instead of 31. With twice this bound it took 119; on
an idle machine this one costs 2 to 6 % of a step (benchmarks/NOTES.md)."""


def worker_environment(threads: int | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment: the one *inherited*, with a bound on OpenMP's spinning unless the operator has set one,
    no plugins of the libraries, and the number of *threads* where OpenMP and MKL look for it."""
    waiting = {} if "OMP_WAIT_POLICY" in inherited else {"GOMP_SPINCOUNT": _SPINS}
    return {
        **waiting,
        **LIBRARIES,
        **inherited,
        **({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}),
    }


class Child(Attached):
    """A worker process. Made by :func:`launch`. Has exited when it has closed its heartbeat pipe, which it does by
    ending."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        arena: Arena,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        beats: int,
        deliver: Callable[[Sequence[Report]], None],
    ):
        self.process, self.step_age = process, 0.0
        self.exited = asyncio.Event()
        self._arena, self._context, self._beats = arena, context, beats
        self._connection = Connection(socket, arena, deliver, self._unreadable)
        self._loop = asyncio.get_running_loop()
        self._last_beat = time.monotonic()
        self._open = True
        os.set_blocking(beats, False)
        self._loop.add_reader(beats, self.read_beats)

    def write_line(self, line: bytes) -> None:
        """Write to the child's standard input, which stays open: its end tells the child that we have died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which `exited` will say

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, commands: list[Command]) -> list[tuple[str, str]]:
        return self._connection.send(commands)

    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()

    def _unreadable(self) -> None:
        _log.exception("a message of worker process %d cannot be read: it is ended", self.process.pid)
        self.process.kill()

    def read_beats(self) -> None:
        if not self._open:
            return
        try:
            data = os.read(self._beats, 4096)
        except BlockingIOError:
            return
        if data:
            self._last_beat = time.monotonic()
            self.step_age = BEAT.unpack(data[-BEAT.size :])[0]
        else:
            self._loop.remove_reader(self._beats)
            self.exited.set()

    def silence(self) -> float:
        return time.monotonic() - self._last_beat

    def dismiss(self) -> None:
        # it waits for our end of its standard input to close
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def reap(self, grace: float) -> str:
        deadline = time.monotonic() + grace
        while self.alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if self.process.poll() is None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        return _describe_exit(self.process.returncode)

    async def stop(self, grace: float) -> None:
        if not self._open:
            return
        if grace > 0 and self.process.poll() is None:
            self.send([Stop()])
        await self.reap(grace)
        self._open = False
        self._connection.close()
        self._loop.remove_reader(self._beats)
        os.close(self._beats)
        self.dismiss()
        self._context.destroy(linger=0)
        self._arena.remove()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
