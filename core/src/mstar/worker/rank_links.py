"""One other rank as rank 0 sees it: what goes there, what runs there, and which values lie there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mstar.spec.errors import RequestError
from mstar.worker.handles import Handle
from mstar.worker.lanes import lane_store
from mstar.worker.messages import Drop, FromRank, Meet, ToRank, UseLanes
from mstar.worker.tensor_channel import TensorChannel, way_between

__all__ = ["Away", "Link", "Peer", "RankLost"]

log = logging.getLogger(__name__)


class Peer(Protocol):
    """The way to one other rank."""

    def send(self, messages: list[ToRank]) -> None:
        """Send *messages*, in order."""

    def receive(self, timeout: float) -> Sequence[FromRank]:
        """What has come, in order; waits up to *timeout* seconds for the first."""

    fault: str | None
    """Set: why nothing that comes from there makes sense any more; the rank is then ended."""


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
    """One other rank while it lives.

    :param channel: the way for large tensors. :ivar settled: whether it is open, or will not be.
    """

    def __init__(self, peer: Peer, channel: TensorChannel):
        self.peer, self.channel = peer, channel
        self.outbox: list[ToRank] = []
        self.dropped: list[int] = []  # keys that nobody here holds any more
        self.flying = self.decoding = 0
        self.broken = False
        self._rank, self._why = 0, ""
        self._own: str | None = None  # why the channel could not be opened here; empty: it could
        self._others: str | None = None  # and there
        self.settled = False

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent there: beside one that decodes none, else two."""
        return self.flying < (1 if self.decoding else 2) and self.channel.has_room

    def flush(self) -> None:
        if self.dropped:
            keys = self.dropped[:]
            del self.dropped[: len(keys)]  # not those that the collector lets go of meanwhile
            self.outbox.append(Drop(keys=keys))
        if self.outbox:
            messages, self.outbox = self.outbox, []
            self.peer.send(self.channel.launch(messages))

    def meet(self, rank: int, asked: str | None, facts: Mapping[str, Any]) -> None:
        """Open the channel with *rank*, if that can be. *asked*: ``engine.values``. *facts*: of the other end."""
        self._rank = rank
        kind = self.channel.device.type
        way, why = way_between(asked, kind, facts.get("device", "cpu"), facts.get("beside_rank_0", False))
        place = facts.get("place")
        if way == "shm" or place is None:
            self._give_up(why if way == "shm" else "there is no place to meet", expected=way == "shm")
            return
        self._why = why
        self.outbox.append(Meet(backend=way))
        self.channel.begin(way, lambda: lane_store(place, first=False)[0], local=not place.startswith("tcp://"))

    def met(self, fault: str) -> None:
        """The other end is open; or *fault*."""
        self._others = fault
        self._agree()

    def _agree(self) -> None:
        """Use the channel when both ends are open, and never if one could not be opened."""
        if self.settled or not ((self._own or self._others) or (self._own == self._others == "")):
            return
        if fault := self._own or self._others:
            self._give_up(fault, expected=False)
            return
        self.settled = True
        self.channel.use()
        self.outbox.append(UseLanes())
        log.info("rank %d: large tensors pass by %s: %s", self._rank, self.channel.backend, self._why)

    def _give_up(self, why: str, expected: bool) -> None:
        self.settled = True
        self.channel.close()
        if not expected:
            self.outbox.append(UseLanes(open=False))
        log.log(logging.INFO if expected else logging.WARNING, "rank %d: tensors pass by messages: %s", self._rank, why)

    def resolve(self, message: FromRank) -> FromRank:
        """*message*, which has just come, with the tensors that are announced in it."""
        try:
            resolved: FromRank = self.channel.resolve(message)
        except (ValueError, RuntimeError) as error:
            self._break(str(error))
            return message
        return resolved

    def look(self) -> None:
        """See what has passed by the channel."""
        if self.channel.opening and (found := self.channel.opened()) is not None:
            self._own = found
            self._agree()
        self.channel.step()
        if self.channel.fault is not None:
            self._break(self.channel.fault)

    def _break(self, reason: str) -> None:
        if not self.broken:
            self.broken = True
            self.peer.fault = f"tensors do not pass: {reason}"


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
