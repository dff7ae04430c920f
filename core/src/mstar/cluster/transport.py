"""Messages between an executor and its worker, and how they become bytes.

A frame is a list of messages in msgpack. Arrays are extension values: small ones hold their bytes, large ones name a
buffer of the :class:`~mstar.cluster.shm.Arena`. Nothing is ever pickled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray

from mstar.cluster.base import Phase
from mstar.cluster.shm import Arena
from mstar.spec.request import Cancel, Done, Emit, EngineRequest, Failed, Push

__all__ = [
    "SHARED_BYTES",
    "Ack",
    "AskStatus",
    "Codec",
    "Command",
    "LinkBroken",
    "LinkEnd",
    "LinkRank",
    "PhaseReport",
    "RankFacts",
    "Report",
    "StatusReport",
    "Stop",
    "UnlinkRank",
    "WorkerFailed",
]

SHARED_BYTES = 64 * 1024
"""Arrays of at least so many bytes travel through shared memory."""

_INLINE, _SHARED = 1, 2  # msgpack extension codes
_KINDS = "biufc"  # numpy dtype kinds that are plain numbers
_log = logging.getLogger(__name__)


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The client has taken *items* emissions of one stream."""

    request: str
    stream: str
    items: int


class AskStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """Answered by a :class:`StatusReport` with the same *number*."""

    number: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """End the worker."""


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank waits for rank 0. *folder*: of shared memory; ``None`` where they are on different machines.
    *server_key*: its public key, where what passes is encrypted."""

    address: str
    folder: str | None
    server_key: str = ""


class LinkRank(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """To rank 0: another rank is ready. *at* and *facts*: what it said of itself."""

    rank: int
    at: LinkEnd
    facts: dict[str, Any]


class UnlinkRank(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """To rank 0: another rank has died."""

    rank: int
    reason: str


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """From a rank other than 0: what rank 0 must know of it (:meth:`mstar.worker.follower.Follower.facts`)."""

    at: LinkEnd
    facts: dict[str, Any]


class LinkBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """From rank 0: what another rank sent cannot be read. It is to be ended, if it lives."""

    rank: int
    message: str


class PhaseReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The worker has entered *phase*, or gone on within it."""

    phase: Phase


class StatusReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The worker's status, as plain data."""

    number: int
    status: dict[str, Any]


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind"):
    """The worker is ending because of an error. *setup*: one that the operator can mend, told in *message*; else a
    fault of the model (:class:`~mstar.spec.errors.FaultFound`). *peer*: it ends because another rank is gone."""

    message: str
    setup: bool = False
    peer: bool = False


Command = EngineRequest | Push | Cancel | Ack | AskStatus | Stop | LinkRank | UnlinkRank
"""From the executor to the worker."""

Report = Emit | Done | Failed | PhaseReport | StatusReport | WorkerFailed | RankFacts | LinkBroken
"""From the worker to the executor."""

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and decodes frames of one connection.

    :param accepts: the union of messages that this end receives.
    :param arena: where large arrays go and come from; ``None`` keeps all of them in the frame.
    """

    def __init__(self, accepts: Any, arena: Arena | None = None):
        self._arena = arena
        self._stored: list[str] = []
        self._full = False
        self._encoder = msgpack.Encoder(enc_hook=self._encode_value)
        self._decoder: msgpack.Decoder[list[M]] = msgpack.Decoder(list[accepts], ext_hook=self._decode_ext)

    def encode(self, messages: Sequence[Any]) -> bytes:
        """One frame. Raises ``TypeError`` for a value that is not plain data; then nothing stays in shared memory."""
        self._stored.clear()
        try:
            return self._encoder.encode(messages)
        except (ValueError, OverflowError, RecursionError) as error:
            # integers beyond 64 bits, strings with lone surrogates, endless nesting
            self.discard()
            raise TypeError(f"a value cannot be sent to another process: {error}") from error
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Free the shared buffers of the frame encoded last, which could not be sent."""
        if self._arena is not None:
            for name in self._stored:
                self._arena.discard(name)
        self._stored.clear()

    def decode(self, frame: bytes) -> list[M]:
        """The messages of *frame*. Its arrays are writable and belong to the caller."""
        return self._decoder.decode(frame)

    def _encode_value(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot be sent to another process: use numpy arrays and plain data")

    def _encode_array(self, array: NDArray[Any]) -> msgpack.Ext:
        if array.dtype.kind not in _KINDS:
            raise TypeError(
                f"an array of dtype {array.dtype} cannot be sent to another process: use numbers or booleans"
            )
        shape = array.shape
        array = np.ascontiguousarray(array)
        if array.nbytes >= SHARED_BYTES and self._arena is not None:
            name = self._arena.write(array.reshape(-1).data.cast("B"))
            if name is not None:
                self._stored.append(name)
                return msgpack.Ext(_SHARED, msgpack.encode((array.dtype.str, shape, name)))
            self._warn_full()
        head = msgpack.encode((array.dtype.str, shape))
        return msgpack.Ext(_INLINE, b"".join((len(head).to_bytes(2, "little"), head, array.tobytes())))

    def _warn_full(self) -> None:
        if not self._full:
            self._full = True
            _log.warning("shared memory is full: large arrays are copied through the socket (slower)")

    def _decode_ext(self, code: int, data: memoryview) -> Any:
        if code == _INLINE:
            start = 2 + int.from_bytes(data[:2], "little")
            dtype, shape = msgpack.decode(data[2:start])
            return np.frombuffer(data, dtype=dtype, offset=start).reshape(shape).copy()
        if code == _SHARED and self._arena is not None:
            dtype, shape, name = msgpack.decode(data)
            size = math.prod(shape) * np.dtype(dtype).itemsize
            return np.frombuffer(self._arena.take(name, size), dtype=dtype).reshape(shape)
        raise ValueError(f"unknown extension code {code} in a frame")
