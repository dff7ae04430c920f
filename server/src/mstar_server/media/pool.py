"""A bounded number of decoders' processes, started when they are needed and replaced when they die.

Files come from anyone, and the libraries that decode them are large and written in C. So a decoder may crash, hang or
want all memory there is: its request gets a 422, the others go on, and a new process takes its place. What travels is
plain data and descriptors; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Coroutine
from typing import Any

import msgspec

from mstar.spec.errors import NotReady, TooBusy
from mstar_server.media.child import HEADER, READY, REPLY_BYTES, Reply, Setup
from mstar_server.media.decoders import Job
from mstar_server.media.limits import MediaFault
from mstar_server.media.output import anonymous_file
from mstar_server.media.source import Source

__all__ = ["DecoderPool"]

log = logging.getLogger("mstar.server")

DECODERS = "mstar_server.media.decoders:DECODERS"
START_S = 60.0
GRACE_S = 0.5
"""How long a decoder whose request was cancelled may go on: to replace a process costs more than most files take."""

_BOOT = (
    "import json, os; line = b''\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1)\n"
    "import sys; sys.path[:] = json.loads(line)['path']\n"
    "from mstar_server.media.child import main; main(line)"
)


class DecoderPool:
    """Runs jobs in processes of their own.

    :param processes: most of them. :param timeout_s: longest job. :param memory_bytes: most memory of each.
    :param max_waiting: jobs that may wait for a process; one more is refused with 429.
    :param decoders: where a process finds its decoders, as ``module:name``.
    """

    def __init__(self, processes: int, timeout_s: float, memory_bytes: int, max_waiting: int, decoders: str = DECODERS):
        self.processes, self.timeout_s, self.max_waiting = processes, timeout_s, max_waiting
        self.waiting = 0
        self._setup = Setup(path=sys.path, decoders=decoders, memory_bytes=memory_bytes, timeout_s=timeout_s)
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The processes that there are now."""
        return [process.pid for process in (*self._idle, *self._running)]

    async def run(self, job: Job, source: Source) -> tuple[Reply, int]:
        """What became of *job*, and the descriptor of the file that its arrays are in, which the caller closes.

        Raises :class:`MediaFault` when the decoder died or took too long, :class:`TooBusy` when too many jobs wait.
        """
        if self.waiting >= self.max_waiting:
            raise TooBusy(f"{self.waiting} files wait for a decoder, the limit")
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        output = anonymous_file()
        # A task of its own: a request that is cancelled leaves, its decoder is looked after until the slot is free.
        work = self._spawn(self._run(msgspec.msgpack.encode(job), source, output))
        try:
            return await asyncio.shield(work), output
        except BaseException:
            os.close(output)
            if not work.done():
                self._spawn(_end_soon(work))
            raise

    async def _run(self, message: bytes, source: Source, output: int) -> Reply:
        process: _Process | None = None
        # duplicates: the caller may close its own while a cancelled job still runs
        fds = [os.dup(source.fd), os.dup(output)]
        whole = False
        try:
            process = await self._take()
            self._running.add(process)
            if self._closed:
                raise NotReady("the server is shutting down")
            reply = await process.ask(message, fds, self.timeout_s)
            whole = True
            return reply
        except TimeoutError:
            text = f"decoding the file took longer than the limit of {self.timeout_s:g} s"
            raise MediaFault(text, "invalid_media", 422) from None
        except (EOFError, OSError, ValueError, msgspec.MsgspecError) as error:
            if self._closed:
                raise NotReady("the server is shutting down") from None
            how = await process.death() if process is not None else error
            log.warning("a media decoder ended on a file of %d bytes: %s", source.size, how)
            raise MediaFault("the file cannot be decoded: its decoder crashed", "invalid_media", 422) from None
        finally:
            for fd in fds:
                os.close(fd)
            if process is not None:
                self._running.discard(process)
                if whole and not self._closed:
                    self._idle.append(process)
                else:
                    process.kill()
            self._slots.release()

    async def _take(self) -> _Process:
        while self._idle:
            idle = self._idle.pop()
            if idle.alive():
                return idle
            idle.kill()  # ended while nobody used it
        process: _Process | None = None
        try:
            process = await asyncio.to_thread(_Process, self._setup)
            await process.ready(START_S)
        except BaseException as error:
            if process is not None:
                process.kill()
            if not isinstance(error, OSError | EOFError | ValueError):
                raise
            log.error("no media decoder could be started: %s", error or type(error).__name__)
            raise NotReady("no media decoder could be started; the server's log has the cause") from None
        return process

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever still waits

    async def close(self) -> None:
        """End all processes and wait for what runs in them to be told."""
        self._closed = True
        for process in self._running:
            process.interrupt()
        for process in self._idle:
            process.kill()
        self._idle.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _end_soon(work: asyncio.Task[Any]) -> None:
    """Give the job that nobody waits for a moment to end by itself."""
    await asyncio.wait([work], timeout=GRACE_S)
    work.cancel()


class _Process:
    """One child and this end of its socket. Killed when it is no longer referred to, at the latest."""

    def __init__(self, setup: Setup):
        ours, theirs = socket.socketpair()
        with theirs:
            self._child: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-c", _BOOT], stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}, start_new_session=True,
            )  # fmt: skip
        ours.sendall(msgspec.json.encode(setup) + b"\n")
        ours.setblocking(False)
        self._socket = ours
        self._finalizer = weakref.finalize(self, _end, self._child, ours)

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        return self._child.poll() is None

    async def ready(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            if await self._receive() != READY:
                raise ValueError("a decoder's first word was not that it is ready")

    async def ask(self, message: bytes, fds: list[int], seconds: float) -> Reply:
        """Raises ``TimeoutError``, ``EOFError`` or ``OSError`` when no answer comes, ``ValueError`` for a wrong one."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            # an idle child has emptied its end: the few bytes of the head never block
            socket.send_fds(self._socket, [HEADER.pack(len(message))], fds)
            await loop.sock_sendall(self._socket, message)
            return msgspec.msgpack.decode(await self._receive(), type=Reply)

    async def _receive(self) -> bytes:
        (size,) = HEADER.unpack(await self._exactly(HEADER.size))
        if size > REPLY_BYTES:
            raise ValueError(f"a reply of {size} bytes")
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < size:
            piece = await loop.sock_recv(self._socket, size - len(data))
            if not piece:
                raise EOFError("the decoder closed its socket")
            data += piece
        return data

    async def death(self) -> str:
        """How the child ended, for the log. Waits a moment, as the socket closes before the process is gone."""
        deadline = time.monotonic() + 0.5
        while (code := self._child.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        if code is None:
            return "it closed its socket"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"

    def interrupt(self) -> None:
        """End the child; whoever waits for its answer learns it from the socket."""
        self._child.kill()

    def kill(self) -> None:
        """End the child and free everything."""
        self._finalizer()


def _end(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    child.kill()
    child.wait()
    connection.close()
