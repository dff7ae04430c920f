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
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from mstar.cluster.base import WorkerConfig
from mstar.cluster.shm import Arena
from mstar.cluster.transport import Codec, Command, Report, Stop
from mstar.log_format import LogFormat, log_format
from mstar.settings import LIBRARIES
from mstar.spec.deployment import Deployment
from mstar.spec.request import EngineRequest, Push

__all__ = ["BEAT", "Child", "Start", "decode_start", "launch", "open_socket"]

BEAT = struct.Struct("d")
"""One heartbeat: seconds that the current step has run."""

# The child's import path is this process's own, as with multiprocessing's spawn; unlike spawn, this does not import the
# caller's main module again, so that scripts and notebooks need no guard.
_BOOT = (
    "import json, sys; line = sys.stdin.buffer.readline(); sys.path[:] = json.loads(line)['path']; "
    "from mstar.cluster.child import main; main(line)"
)
_FRAMES_A_TURN = 64
_log = logging.getLogger(__name__)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON that a child reads first.

    :param path: import path. :param folder: the :class:`~mstar.cluster.shm.Arena`. :param beats: file descriptor of the
        heartbeat pipe. :param beat_s: seconds between heartbeats. :param log_level: of the parent's root logger.
        :param log_form: of its lines. :param link: folder of the link to rank 0, for other ranks.
    """

    path: list[str]
    config: WorkerConfig
    worker_factory: str
    registry_factory: str
    address: str
    folder: str
    beats: int
    beat_s: float
    log_level: int
    log_form: LogFormat = "text"
    link: str | None = None


def _encode_deployment(value: Any) -> Any:
    if isinstance(value, Deployment):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be part of a worker's configuration")


def _decode_deployment(kind: type, value: Any) -> Any:
    if kind is Deployment:
        return Deployment.model_validate(value)
    raise TypeError(f"a {kind.__name__} cannot be part of a worker's configuration")


def decode_start(line: bytes) -> Start:
    """The child's side of :func:`launch`'s first line."""
    return msgspec.json.decode(line, type=Start, dec_hook=_decode_deployment)


def open_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """One end of the connection. Queues are unbounded: acks and the worker's bounded queue limit what is in flight."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    return socket


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
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, "mstar-worker", config.key, *([f"rank-{config.rank}"] if link else [])],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            env=_environment(config),
        )
        child = Child(process, arena, context, socket, reader, deliver)
    except BaseException:
        os.close(reader)
        context.destroy(linger=0)
        arena.remove()
        raise
    finally:
        os.close(writer)
    child.write_line(msgspec.json.encode(start, enc_hook=_encode_deployment))
    return child


_SPINS = "10000"
"""How often an idle OpenMP thread looks for work before it sleeps (libgomp; its own default is far more).

A step is hundreds of short parallel regions. With the default, one busy neighbour on two cores makes each of them wait
for a thread that was preempted while it spun: a token took 980 ms instead of 31. With twice this bound it took 119; on
an idle machine this one costs 2 to 6 % of a step (benchmarks/NOTES.md)."""


def _environment(config: WorkerConfig) -> dict[str, str]:
    """The child's environment: ours, with a bound on OpenMP's spinning unless the operator has set one, no plugins of
    the libraries, and the deployment's thread count where OpenMP and MKL look for it."""
    threads = config.deployment.engine.threads
    waiting = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": _SPINS}
    return {
        **waiting,
        **LIBRARIES,
        **os.environ,
        **({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)} if threads else {}),
    }


class Child:
    """A worker process. Made by :func:`launch`; ended, with all that belongs to it, by :meth:`stop`.

    :ivar exited: set when the process has closed its heartbeat pipe, which it does by ending.
    :ivar step_age: seconds that its current step had run at the last heartbeat.
    """

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
        self._arena, self._context, self._socket, self._beats, self._deliver = arena, context, socket, beats, deliver
        self._codec: Codec[Report] = Codec(Report, arena)
        self._loop = asyncio.get_running_loop()
        self._last_beat = time.monotonic()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._open = True
        os.set_blocking(beats, False)
        self._loop.add_reader(self._fd, self._read_reports)
        self._loop.add_reader(beats, self.read_beats)

    def write_line(self, line: bytes) -> None:
        """Write to the child's standard input, which stays open: its end tells the child that we have died."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which `exited` will say

    def send(self, commands: list[Command]) -> list[tuple[str, str]]:
        """Send *commands* as one message. Returns those that cannot be: request and reason."""
        try:
            self._send_frame(self._codec.encode(commands))
            return []
        except TypeError:
            return self._send_singly(commands)

    def _send_singly(self, commands: list[Command]) -> list[tuple[str, str]]:
        """One command a frame, so that the one that does not encode fails alone."""
        faults: list[tuple[str, str]] = []
        for command in commands:
            try:
                self._send_frame(self._codec.encode([command]))
            except TypeError as error:
                assert isinstance(command, EngineRequest | Push)  # the others hold no foreign data
                faults.append((command.id, str(error)))
        return faults

    def _send_frame(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._codec.discard()  # no peer any more: `exited` will say so
        # Sending may consume the descriptor's edge that announces a message.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read_reports)

    def _read_reports(self) -> None:
        """Deliver what has come. The descriptor is edge-triggered: read all, in this turn or the next."""
        for _ in range(_FRAMES_A_TURN):
            if not self._open:
                return  # closed by what was just delivered
            try:
                frame: bytes = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                reports = self._codec.decode(frame)
            except Exception:  # a shared buffer was removed by someone else, say: its request would wait for ever
                _log.exception("a message of worker process %d cannot be read: it is ended", self.process.pid)
                self.process.kill()
                return
            self._deliver(reports)
        self._loop.call_soon(self._read_reports)

    def read_beats(self) -> None:
        """Take the heartbeats that have come."""
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
        """Seconds since the last heartbeat."""
        return time.monotonic() - self._last_beat

    def dismiss(self) -> None:
        """Let a child go that has said why it ends: it waits for our end of its standard input to close."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def reap(self, grace: float) -> str:
        """Wait up to *grace* seconds for the process to end, then kill it. Returns how it ended, in words."""
        deadline = time.monotonic() + grace
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if self.process.poll() is None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        return _describe_exit(self.process.returncode)

    async def stop(self, grace: float) -> None:
        """End the process, by :class:`~mstar.cluster.transport.Stop` if that takes less than *grace* seconds, and free
        the sockets, the pipe and the folder."""
        if not self._open:
            return
        if grace > 0 and self.process.poll() is None:
            self._send_frame(self._codec.encode([Stop()]))
        await self.reap(grace)
        self._open = False
        self._loop.remove_reader(self._fd)
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
