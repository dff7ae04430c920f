"""A worker as its executor has it, wherever it runs: the end of the socket, and what can be done to the worker."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence

import zmq

from mstar.cluster.shm import Arena
from mstar.cluster.transport import Codec, Command, Report
from mstar.spec.errors import SetupError
from mstar.spec.request import EngineRequest, Push

__all__ = ["Attached", "Connection", "encrypt", "encrypt_for", "open_socket"]

_FRAMES_A_TURN = 64


def open_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """One end of the connection. Queues are unbounded: acks and the worker's bounded queue limit what is in flight."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    return socket


_PROBE_MS = 10_000
_PATIENCE_MS = 60_000


def encrypt(socket: zmq.Socket[bytes]) -> str:
    """Make *socket*, which is about to be bound, one that only those can connect to who know the key that is returned.
    What passes is encrypted and cannot be changed on the way (CURVE). A peer that is gone without a word, with its
    machine, say, counts as gone after a minute.

    :raises SetupError: this pyzmq cannot do it.
    """
    if not zmq.has("curve"):
        raise SetupError("this pyzmq was built without CURVE, which is needed between machines; install its wheel")
    public, secret = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    _probe(socket)
    return public.decode()


def encrypt_for(socket: zmq.Socket[bytes], server_key: str) -> None:
    """The same for the end that connects."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key.encode()
    _probe(socket)


def _probe(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PROBE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PATIENCE_MS)


class Connection:
    """The executor's end of the socket, read on the running event loop.

    :param arena: what large arrays pass through; ``None`` where the worker is on another machine.
    :param deliver: called with what the worker reports.
    :param unreadable: called while an exception is handled: a message of the worker cannot be read. No more is read.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        arena: Arena | None,
        deliver: Callable[[Sequence[Report]], None],
        unreadable: Callable[[], None],
    ):
        self._socket, self._deliver, self._unreadable = socket, deliver, unreadable
        self._codec: Codec[Report] = Codec(Report, arena)
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._open = True
        self._loop.add_reader(self._fd, self._read_reports)

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
            self._codec.discard()  # no peer any more: its end will be told
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
                self._unreadable()
                return
            self._deliver(reports)
        self._loop.call_soon(self._read_reports)

    def close(self) -> None:
        """Read no more. The socket goes with its context."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)


class Attached(abc.ABC):
    """A worker that was started for an executor. Ended, with all that belongs to it, by :meth:`stop`.

    :ivar exited: set when it has ended. :ivar step_age: seconds that its current step had run at its last sign of life.
    """

    exited: asyncio.Event
    step_age: float

    @property
    @abc.abstractmethod
    def pid(self) -> int | None:
        """Its process id on its machine; ``None`` while that is not known."""

    @abc.abstractmethod
    def send(self, commands: list[Command]) -> list[tuple[str, str]]:
        """Send *commands* as one message. Returns those that cannot be: request and reason."""

    @abc.abstractmethod
    def alive(self) -> bool: ...

    @abc.abstractmethod
    def kill(self) -> None:
        """End it at once; :attr:`exited` is set when it has."""

    @abc.abstractmethod
    def silence(self) -> float:
        """Seconds since its last sign of life."""

    @abc.abstractmethod
    def read_beats(self) -> None:
        """Take the signs of life that have come."""

    @abc.abstractmethod
    def dismiss(self) -> None:
        """Let go a worker that has said why it ends."""

    @abc.abstractmethod
    async def reap(self, grace: float) -> str:
        """Wait up to *grace* seconds for its end, then kill it. Returns how it ended, in words."""

    @abc.abstractmethod
    async def stop(self, grace: float) -> None:
        """End it, by :class:`~mstar.cluster.transport.Stop` if that takes less than *grace* seconds, and free all that
        was there for it."""
