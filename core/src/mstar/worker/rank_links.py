"""One other rank as rank 0 sees it: what goes there, what runs there, and which values lie there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from mstar.spec.errors import RequestError
from mstar.worker.handles import Handle
from mstar.worker.messages import Drop, FromRank, ToRank

__all__ = ["Away", "Link", "Peer", "RankLost"]


class Peer(Protocol):
    """The way to one other rank."""

    def send(self, messages: list[ToRank]) -> None:
        """Send *messages*, in order."""

    def receive(self, timeout: float) -> Sequence[FromRank]:
        """What has come, in order; waits up to *timeout* seconds for the first."""


class RankLost(RequestError):
    """The rank that a request was served by has died."""

    def __init__(self, rank: int, reason: str):
        super().__init__(
            f"rank {rank}, which served a part of the request, is gone: {reason}",
            code="worker_died",
            status=503,
            type="server_error",
        )
        self.retry_after = 5.0


class Link:
    """One other rank while it lives."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self.outbox: list[ToRank] = []
        self.dropped: list[int] = []  # keys that nobody here holds any more
        self.flying = self.decoding = 0

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent there: beside one that decodes none, else two."""
        return self.flying < (1 if self.decoding else 2)

    def flush(self) -> None:
        if self.dropped:
            keys = self.dropped[:]
            del self.dropped[: len(keys)]  # not those that the collector lets go of meanwhile
            self.outbox.append(Drop(keys=keys))
        if self.outbox:
            messages, self.outbox = self.outbox, []
            self.peer.send(messages)


class Away:
    """Where else a tensor is. *held*: rank → its hold there, and at which of the tensor's items it begins."""

    __slots__ = ("_fetch", "held")

    def __init__(self, fetch: Callable[[int, int], Tensor]):
        self.held: dict[int, tuple[Handle, int]] = {}
        self._fetch = fetch

    def copy(self) -> Away:
        """One that holds the same, and may come to hold more."""
        other = Away(self._fetch)
        other.held.update(self.held)
        return other

    def fetch(self) -> Tensor:
        """The tensor, of which nothing is here but its shape. Waits for a rank that has it."""
        rank, (handle, _) = next(iter(self.held.items()))
        return self._fetch(rank, handle.key)
