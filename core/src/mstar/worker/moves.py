"""State of requests that moves from rank to rank, where a node has a place for each walk.

A request has a reservation at all of its places from the start. When a call comes whose place is another one than that
of its request's state, it waits here: the ranks that have the state gather it and send it to rank 0, by shared memory,
beside the steps that they run meanwhile; it goes on to the ranks where it is to be, and what was held for it before is
free. Then the call is ready. What is sent to a rank comes in order, so a step finds the state that was sent before it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mstar.engine.device import raise_if_lost
from mstar.graph.calls import CallRun
from mstar.resources.base import Owner, Resource, State
from mstar.resources.staging import Late
from mstar.worker.handles import pack, unpack
from mstar.worker.live import Live
from mstar.worker.messages import Close, Export, Exported, Held, Import, ToRank
from mstar.worker.seats import SeatedPool, Seats

__all__ = ["Leaving", "Moves", "adopt"]

_HERE = 0
_AT_ONCE = 2
"""Moves from one seat that are on their way at a time: each takes as much of the host's memory as its state has."""

log = logging.getLogger(__name__)


class Leaving:
    """State of some owners on its way from the device to the host."""

    def __init__(self, pools: Mapping[str, Resource], owners: Sequence[tuple[str, Owner]]):
        with torch.inference_mode():
            states = [pools[name].export(owner) for name, owner in owners]
        self._owners = owners
        self._facts = [state.facts for state in states]
        self._tensors = [{name: Late(tensor) for name, tensor in state.tensors.items()} for state in states]

    def there(self) -> bool:
        """Whether nobody would have to wait for it."""
        return all(late.done() for tensors in self._tensors for late in tensors.values())

    def held(self) -> list[Held]:
        """It as a message; waits until it is there."""
        return [
            Held(
                name,
                owner.key,
                owner.context,
                dict(facts),
                {key: pack(0, late.tensor()) for key, late in tensors.items()},
            )
            for (name, owner), facts, tensors in zip(self._owners, self._facts, self._tensors, strict=True)
        ]


def adopt(pools: Mapping[str, Resource], request: Any, held: Sequence[Held], device: torch.device) -> None:
    """Go on with what other ranks *held* for *request*."""
    with torch.inference_mode():
        for one in held:
            tensors = {key: unpack(contents, device) for key, contents in one.tensors.items()}
            pools[one.resource].adopt(Owner(one.key, one.context), request, State(one.facts, tensors))


class _Ranks(Protocol):
    """What moves need of :class:`mstar.worker.ranks.Ranks`."""

    seats: Seats
    books: dict[str, Resource]

    def tell(self, rank: int, message: ToRank) -> None: ...
    def flush(self) -> None: ...


class _Move:
    """*shares*: what each of the source's ranks has sent; *leaving*: what is on its way from this one."""

    __slots__ = ("began", "call", "leaving", "live", "number", "owners", "shares", "source", "target")

    def __init__(self, number: int, live: Live, call: CallRun, owners: list[tuple[str, Owner]], seats: Seats):
        self.number, self.live, self.call, self.owners = number, live, call, owners
        self.source, self.target = seats.of_call(call), seats.target(call)
        self.shares: dict[int, list[Held]] = {}
        self.leaving: Leaving | None = None
        self.began = time.monotonic()


class Moves:
    """The moves of rank 0's requests.

    :param pools: this rank's, by name. :param ready: told of a call whose state is where it runs.
    :param failed: told of a request whose state could not be moved, and why.
    """

    def __init__(
        self,
        ranks: _Ranks,
        pools: Mapping[str, Resource],
        device: torch.device,
        ready: Callable[[Live, CallRun], None],
        failed: Callable[[Live, Exception], None],
    ):
        self._ranks, self._pools, self._device = ranks, pools, device
        self._ready, self._failed = ready, failed
        self._numbers = itertools.count(1)
        self._waiting: deque[_Move] = deque()
        self._under_way: dict[int, _Move] = {}
        self._done, self._bytes, self._seconds = 0, 0, 0.0

    def holds(self, live: Live, call: CallRun) -> bool:
        """Whether *call* has to wait for its state; it is told to ``ready`` when that has come."""
        seats = self._ranks.seats
        if seats.of_call(call) == seats.target(call):
            return False
        owners = [(name, owner) for name, owner in live.holding.owners if seats.moves(name, call.op.call.node)]
        if not owners:  # a node without state runs where it likes
            seats.moved(call)
            return False
        self._waiting.append(_Move(next(self._numbers), live, call, owners, seats))
        self._begin()
        return True

    def take(self, message: Exported) -> None:
        """A rank has sent what it was asked for."""
        move = self._under_way.get(message.move)
        if move is not None:  # its request has not ended meanwhile
            move.shares[message.rank] = message.held
            self._advance(move)

    def step(self) -> bool:
        """Go on with what has come to the host since. Returns whether there was any."""
        arrived = [m for m in self._under_way.values() if m.leaving is not None and m.leaving.there()]
        for move in arrived:
            self._advance(move)
        return bool(arrived)

    @property
    def waits_for_device(self) -> bool:
        """Whether something is on its way to the host, of which nobody will tell."""
        return any(move.leaving is not None for move in self._under_way.values())

    def forget(self, live: Live) -> None:
        """The request has ended."""
        if not self._waiting and not self._under_way:
            return
        self._waiting = deque(move for move in self._waiting if move.live is not live)
        for number in [number for number, move in self._under_way.items() if move.live is live]:
            del self._under_way[number]
        self._begin()

    def status(self) -> dict[str, Any]:
        """Since the start. *seconds*: from the moment that a call was ready to that when its state had come."""
        return {
            "done": self._done,
            "bytes": self._bytes,
            "seconds": self._seconds,
            "waiting": len(self._waiting) + len(self._under_way),
        }

    def _begin(self) -> None:
        """Start those that may."""
        under_way = [move.source for move in self._under_way.values()]
        started = []
        for move in self._waiting:
            if under_way.count(move.source) < _AT_ONCE:
                under_way.append(move.source)
                started.append(move)
        self._waiting = deque(move for move in self._waiting if move not in started)
        for move in started:
            self._under_way[move.number] = move
        for move in started:
            if move.number in self._under_way:
                self._guarded(move, self._start)

    def _start(self, move: _Move) -> None:
        asked = [(name, owner.key, owner.context) for name, owner in move.owners]
        for rank in move.source.ranks:
            if rank != _HERE:
                self._ranks.tell(rank, Export(move=move.number, request=move.live.request.id, owners=asked))
        self._ranks.flush()
        if _HERE in move.source.ranks:
            move.leaving = Leaving(self._pools, move.owners)
            if move.leaving.there():
                self._advance(move)

    def _advance(self, move: _Move) -> None:
        if move.leaving is not None and move.leaving.there():
            move.shares[_HERE], move.leaving = move.leaving.held(), None
        if len(move.shares) == len(move.source.ranks):
            del self._under_way[move.number]
            self._guarded(move, self._land)
            self._begin()

    def _guarded(self, move: _Move, action: Callable[[_Move], None]) -> None:
        """What *action* raises ends the move's request only, unless the device is lost."""
        try:
            action(move)
        except Exception as error:
            raise_if_lost(error)
            log.exception("the state of request %r could not be moved to %s", move.live.request.id, move.target)
            self._failed(move.live, error)

    def _land(self, move: _Move) -> None:
        request = move.live.request
        for source, target in zip(move.source.ranks, move.target.ranks, strict=True):
            if target == _HERE:
                adopt(self._pools, request, move.shares[source], self._device)
            else:
                self._ranks.tell(target, Import(request=request.id, held=move.shares[source]))
        for name, owner in move.owners:
            pool = self._ranks.books[name]
            assert isinstance(pool, SeatedPool)
            if _HERE not in move.target.ranks:
                books = pool.pools[move.target]
                books.open(owner, request)
                books.follow(owner, self._tokens(move, name, owner))
            pool.leave(owner, move.source)
        freed = [(name, owner.key, owner.context) for name, owner in move.owners]
        for rank in move.source.ranks:
            if rank != _HERE:
                self._ranks.tell(rank, Close(owners=freed))
        self._ranks.flush()
        self._ranks.seats.moved(move.call)
        self._done += 1
        self._bytes += sum(_size(share) for share in move.shares.values())
        self._seconds += time.monotonic() - move.began
        self._ready(move.live, move.call)

    def _tokens(self, move: _Move, resource: str, owner: Owner) -> int:
        """How many tokens of *owner* *resource* held where it came from, if it counts them."""
        share = next(iter(move.shares.values()))
        held = next(one for one in share if (one.resource, one.key, one.context) == (resource, *owner))
        return int(held.facts.get("tokens", 0))


def _size(held: Sequence[Held]) -> int:
    return sum(contents.data.nbytes for one in held for contents in one.tensors.values() if contents.data is not None)
