"""A decoder's process: takes one job after the other from its socket until that is closed.

A job comes with two descriptors, the file to decode and the file to write to. What it may use is bounded here: memory
by the kernel (a decoder that wants more gets an error or dies), time by an alarm that ends the process even when its
parent is gone. It imports no torch and answers with plain data.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from typing import Any

import msgspec

from mstar_server.media.limits import MediaFault
from mstar_server.media.output import Decoded, Output

__all__ = ["HEADER", "READY", "REPLY_BYTES", "Reply", "Setup", "main"]

HEADER = struct.Struct("!I")
READY = b"ready"
REPLY_BYTES = 1 << 16
_JOB_BYTES = 1 << 22


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The line of JSON that a child reads first.

    :param path: import path. :param decoders: ``module:name`` of the decoders by name. :param memory_bytes: what it may
        allocate beyond what it has once everything is imported. :param timeout_s: longest job.
    """

    path: list[str]
    decoders: str
    memory_bytes: int
    timeout_s: float


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a job: *decoded*, or what is wrong with the file."""

    decoded: Decoded | None = None
    message: str = ""
    code: str = ""
    status: int = 400


def main(line: bytes) -> None:
    """Serve the socket on standard input."""
    setup = msgspec.json.decode(line, type=Setup)
    module, _, name = setup.decoders.partition(":")
    decoders = getattr(__import__(module, fromlist=[name]), name)
    for library in ("av", "soundfile"):  # what they map now does not count against the limit of memory
        with contextlib.suppress(ImportError, OSError):  # said when a file needs one
            __import__(library)

    from mstar_server.media.decoders import Job

    _limit_memory(setup.memory_bytes)
    connection = socket.socket(fileno=0)
    _send(connection, READY)
    while (received := _receive(connection)) is not None:
        message, fds = received
        signal.setitimer(signal.ITIMER_REAL, setup.timeout_s + 5)
        job = msgspec.msgpack.decode(message, type=Job)
        reply = _reply(decoders[job.decoder], fds, job)
        for fd in fds:
            os.close(fd)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, msgspec.msgpack.encode(reply))


def _reply(decoder: Any, fds: list[int], job: Any) -> Reply:
    try:
        return Reply(decoded=decoder(fds[0], job, Output(fds[1], job.limits.max_decoded_bytes)))
    except MediaFault as fault:
        return Reply(message=fault.message, code=fault.code, status=fault.status)
    except ImportError as error:
        message = f"this server cannot read such files, because a library of it does not load: {error}"
        return Reply(message=message[:400], code="decoder_unavailable", status=400)
    except MemoryError:
        message = "decoding the file needs more memory than the server allows"
        return Reply(message=message, code="decoded_too_large", status=413)
    except Exception as error:  # a library's way of saying that it did not expect such a file
        said = f"{type(error).__name__}: {error}"[:200]
        return Reply(message=f"the file cannot be decoded ({said})", code="invalid_media", status=422)


def _limit_memory(extra: int) -> None:
    if sys.platform != "linux":
        return  # elsewhere the kernel does not enforce it
    import resource

    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + extra, mapped + extra))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(HEADER.pack(len(message)) + message)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next message and its descriptors; ``None`` when the parent has closed the socket."""
    head, fds, _, _ = socket.recv_fds(connection, HEADER.size, 2)
    while head and len(head) < HEADER.size:
        head += connection.recv(HEADER.size - len(head))
    if not head:
        return None
    (size,) = HEADER.unpack(head)
    if size > _JOB_BYTES:
        raise ValueError(f"a job of {size} bytes")
    message = b""
    while len(message) < size:
        message += connection.recv(size - len(message))
    return message, fds
