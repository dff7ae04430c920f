"""The way between rank 0 and another rank: a socket for messages and, on one machine, a folder of shared memory for
large values."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from mstar.cluster.connection import encrypt, encrypt_for, open_socket
from mstar.cluster.shm import Arena
from mstar.cluster.transport import Codec, LinkEnd
from mstar.worker.messages import FromRank, ToRank

__all__ = ["RankLink"]

_log = logging.getLogger(__name__)


class RankLink:
    """One end. Used by one thread.

    :ivar fault: why what came last could not be read; then no more is read.
    """

    def __init__(self, socket: zmq.Socket[bytes], codec: Codec[Any]):
        self.socket, self._codec = socket, codec
        self.fault: str | None = None
        self._dead = False

    @classmethod
    def at(cls, context: zmq.Context[zmq.Socket[bytes]], place: str) -> tuple[RankLink, LinkEnd]:
        """The end of a rank other than 0, which is there first. *place*: a folder that both ends see, or ``tcp://HOST``:
        then at any free port of it, encrypted. Also returns what rank 0 needs to know of it."""
        socket = open_socket(context)
        if place.startswith("tcp://"):
            key = encrypt(socket)
            end = LinkEnd(address=f"{place}:{socket.bind_to_random_port(place)}", folder=None, server_key=key)
            return cls(socket, Codec(ToRank)), end
        folder = Path(place)
        end = LinkEnd(address=f"ipc://{folder / 'link'}", folder=place)
        socket.bind(end.address)
        return cls(socket, Codec(ToRank, Arena(folder, end="f"))), end

    @classmethod
    def to(cls, context: zmq.Context[zmq.Socket[bytes]], end: LinkEnd) -> RankLink:
        """The end of rank 0."""
        socket = open_socket(context)
        if end.server_key:
            encrypt_for(socket, end.server_key)
        socket.connect(end.address)
        return cls(socket, Codec(FromRank, None if end.folder is None else Arena(Path(end.folder), end="l")))

    def send(self, messages: Sequence[Any]) -> None:
        """Send *messages* as one frame; dropped when nobody is there any more, which the executor finds out."""
        if self._dead:
            return
        try:
            frame = self._codec.encode(messages)
        except FileNotFoundError:  # the folder went with the other rank
            self._dead = True
            return
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._codec.discard()

    def take(self) -> list[Any]:
        """What has come, in order."""
        messages: list[Any] = []
        while not self._dead:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.extend(self._codec.decode(frame))
            except Exception as error:
                gone = isinstance(error, FileNotFoundError)  # a shared buffer went with the other rank
                level = logging.DEBUG if gone else logging.ERROR
                _log.log(level, "a message of another rank cannot be read", exc_info=True)
                self.fault, self._dead = f"{type(error).__name__}: {error}", True
        return messages

    def receive(self, timeout: float) -> Sequence[Any]:
        """:meth:`take`, after waiting up to *timeout* seconds for the first message."""
        until = time.monotonic() + timeout
        while not (messages := self.take()) and (left := until - time.monotonic()) > 0 and not self._dead:
            self.socket.poll(int(left * 1000) + 1)
        return messages

    def close(self) -> None:
        self._dead = True
        self.socket.close(linger=0)
