"""State of requests that moves from rank to rank, where a node has a place for each walk.

A request has a reservation at all of its places from the start. When a call comes whose place is another one than that
of its request's state, it waits here: the ranks that have the state gather it and send it to rank 0, by a lane or by
shared memory, beside the steps that they run meanwhile; it goes on to the ranks where it is to be, and what was held
for it before is free. Then the call is ready. What is sent to a rank comes in order, so a step finds the state that was
sent before it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from mstar.engine.device import raise_if_lost
from mstar.graph.calls import CallRun
from mstar.resources.base import Owner, Resource, State
from mstar.resources.staging import Late, record
from mstar.worker.aside import Aside
from mstar.worker.handles import Arriving, pack, unpack
from mstar.worker.live import Live
from mstar.worker.messages import Close, Contents, Export, Exported, Held, Import, ToRank
from mstar.worker.seats import SeatedPool, Seats
from mstar.worker.tensor_channel import TensorChannel

__all__ = ["STAGES", "Leaving", "Moves", "adopt"]

_HERE = 0
_AT_ONCE = 2
"""Moves from one seat that are on their way at a time: each takes as much of the host's memory as its state has."""

log = logging.getLogger(__name__)


class Leaving:
    """State of some owners that leaves this rank: by *channel*, and what that does not take by way of the host."""

    def __init__(
        self,
        pools: Mapping[str, Resource],
        owners: Sequence[tuple[str, Owner]],
        channel: TensorChannel | None = None,
    ):
        with torch.inference_mode():
            states = [pools[name].export(owner) for name, owner in owners]
        self._owners = owners
        self._facts = [state.facts for state in states]
        self._channel = channel
        with torch.inference_mode():
            self._tensors = [{name: self._begun(each) for name, each in state.tensors.items()} for state in states]
        self._gathered: Any = None
        device = next((each.device for state in states for each in state.tensors.values() if each.is_cuda), None)
        if device is not None:
            self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record(self._gathered, device)

    def _begun(self, tensor: Tensor) -> Tensor | Late:
        return tensor if self._channel is not None and self._channel.takes(tensor) else Late(tensor)

    def there(self) -> bool:
        """Whether nobody would have to wait for it: who is told of it receives at once, which occupies a GPU."""
        return self._gathered is None or bool(self._gathered.query())

    def held(self) -> list[Held]:
        """It for a message, which goes next; waits until it is there."""
        return [
            Held(
                name,
                owner.key,
                owner.context,
                dict(facts),
                {key: self._packed(one) for key, one in tensors.items()},
            )
            for (name, owner), facts, tensors in zip(self._owners, self._facts, self._tensors, strict=True)
        ]

    def _packed(self, one: Tensor | Late) -> Contents:
        if isinstance(one, Late):
            return pack(0, one.tensor())
        assert self._channel is not None
        return self._channel.pack(0, one)


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
    def channel(self, rank: int) -> TensorChannel | None: ...


class _Move:
    """*shares*: what each of the source's ranks has sent; *leaving*: what leaves this one."""

    __slots__ = ("call", "leaving", "live", "number", "owners", "shares", "source", "target", "times")

    def __init__(self, number: int, live: Live, call: CallRun, owners: list[tuple[str, Owner]], seats: Seats):
        self.number, self.live, self.call, self.owners = number, live, call, owners
        self.source, self.target = seats.of_call(call), seats.target(call)
        self.shares: dict[int, list[Held]] = {}
        self.leaving: Leaving | None = None
        self.times = [time.monotonic()]  # when each of its stages began


STAGES = ("queue", "gather", "transfer", "place")
"""What a move does one after the other: it waits for others from the same ranks; its state is gathered there, and
announced; it comes; it is put into its pools, or sent on to those of its rank."""


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
        self._aside = Aside(device)
        self._numbers = itertools.count(1)
        self._waiting: deque[_Move] = deque()
        self._under_way: dict[int, _Move] = {}
        self._done, self._bytes = 0, 0
        self._seconds = dict.fromkeys(STAGES, 0.0)

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
        """A rank sends what it was asked for."""
        move = self._under_way.get(message.move)
        if move is not None:  # its request has not ended meanwhile
            move.shares[message.rank] = message.held
            self._announced(move)
            self._advance(move)

    def step(self) -> bool:
        """Go on with what is there since. Returns whether there was any."""
        complete = [move for move in self._under_way.values() if self._complete(move)]
        for move in complete:
            self._advance(move)
        return bool(complete)

    @property
    def waits_for_device(self) -> bool:
        """Whether something is on its way, of which nobody will tell."""
        return any(
            move.leaving is not None or len(move.shares) == len(move.source.ranks) for move in self._under_way.values()
        )

    def forget(self, live: Live) -> None:
        """The request has ended."""
        if not self._waiting and not self._under_way:
            return
        self._waiting = deque(move for move in self._waiting if move.live is not live)
        for number in [number for number, move in self._under_way.items() if move.live is live]:
            del self._under_way[number]
        self._begin()

    def status(self) -> dict[str, Any]:
        """Since the start. *seconds*: from the moment that a call was ready to that when its state had come; *stages*:
        what of it went where."""
        return {
            "done": self._done,
            "bytes": self._bytes,
            "seconds": sum(self._seconds.values()),
            "stages": dict(self._seconds),
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

    def _announced(self, move: _Move) -> None:
        """Another rank's share has been, or this one's begun."""
        if len(move.shares) + (move.leaving is not None) == len(move.source.ranks):
            move.times.append(time.monotonic())

    def _start(self, move: _Move) -> None:
        move.times.append(time.monotonic())
        asked = [(name, owner.key, owner.context) for name, owner in move.owners]
        for rank in move.source.ranks:
            if rank != _HERE:
                self._ranks.tell(rank, Export(move=move.number, request=move.live.request.id, owners=asked))
        self._ranks.flush()
        if _HERE in move.source.ranks:
            target = move.target.ranks[move.source.ranks.index(_HERE)]
            with self._aside.behind(self._aside.mark()):
                move.leaving = Leaving(self._pools, move.owners, self._ranks.channel(target))
            self._announced(move)
            self._advance(move)

    def _complete(self, move: _Move) -> bool:
        """Whether all that moves is there, and can go on."""
        if len(move.shares) + (move.leaving is not None) < len(move.source.ranks):
            return False
        if move.leaving is not None and not move.leaving.there():
            return False
        channels = [self._ranks.channel(rank) for rank in move.target.ranks]
        return all(map(_there, move.shares.values())) and all(one is None or one.has_room for one in channels)

    def _advance(self, move: _Move) -> None:
        if self._complete(move):
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
        move.times.append(time.monotonic())
        self._ranks.flush()  # what was told before is of the steps' stream
        with self._aside.behind():
            shares = dict(move.shares)
            if move.leaving is not None:
                shares[_HERE] = move.leaving.held()
            for source, target in zip(move.source.ranks, move.target.ranks, strict=True):
                if target != _HERE:
                    self._ranks.tell(target, Import(request=request.id, held=self._onwards(shares[source], target)))
            self._ranks.flush()
        for source, target in zip(move.source.ranks, move.target.ranks, strict=True):
            if target == _HERE:
                adopt(self._pools, request, shares[source], self._device)
        for name, owner in move.owners:
            pool = self._ranks.books[name]
            assert isinstance(pool, SeatedPool)
            if _HERE not in move.target.ranks:
                books = pool.pools[move.target]
                books.open(owner, request)
                books.follow(owner, _tokens(shares[move.source.ranks[0]], name, owner))
            pool.leave(owner, move.source)
        freed = [(name, owner.key, owner.context) for name, owner in move.owners]
        for rank in move.source.ranks:
            if rank != _HERE:
                self._ranks.tell(rank, Close(owners=freed))
        self._ranks.flush()
        self._ranks.seats.moved(move.call)
        self._done += 1
        self._bytes += sum(map(_size, shares.values()))
        move.times.append(time.monotonic())
        for stage, (begun, ended) in zip(STAGES, itertools.pairwise(move.times), strict=True):
            self._seconds[stage] += ended - begun
        self._ready(move.live, move.call)

    def _onwards(self, share: Sequence[Held], target: int) -> list[Held]:
        """*share* for rank *target*: what a lane brought from another rank goes on by that rank's."""
        channel = self._ranks.channel(target)
        if channel is None:
            return list(share)
        return [
            msgspec.structs.replace(
                one,
                tensors={
                    name: channel.pack(0, unpack(contents, self._device))
                    if isinstance(contents.data, Arriving)
                    else contents
                    for name, contents in one.tensors.items()
                },
            )
            for one in share
        ]


def _tokens(share: Sequence[Held], resource: str, owner: Owner) -> int:
    """How many tokens of *owner* *resource* held where it came from, if it counts them."""
    held = next(one for one in share if (one.resource, one.key, one.context) == (resource, *owner))
    return int(held.facts.get("tokens", 0))


def _there(share: Sequence[Held]) -> bool:
    """Whether all that a rank sends of its state has come."""
    return all(
        contents.data.there()
        for one in share
        for contents in one.tensors.values()
        if isinstance(contents.data, Arriving)
    )


def _size(held: Sequence[Held]) -> int:
    """Bytes."""
    return sum(
        math.prod(contents.shape) * getattr(torch, contents.dtype).itemsize
        for one in held
        for contents in one.tensors.values()
    )
