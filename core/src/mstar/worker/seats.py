"""Nodes that several seats of a layout each have all of: which seat serves a call, and the books of their pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp, Plan
from mstar.resources.base import IntegrityError, Owner, Resource, Usage
from mstar.spec.errors import RequestError
from mstar.spec.placement import Layout, Seat, companions, users_of
from mstar.spec.request import EngineRequest

__all__ = ["SeatedPool", "Seats"]


class _Path:
    """The seats that one request, or session, has of some nodes, one after the other, and at which of them it is."""

    __slots__ = ("at", "seats")

    def __init__(self, seats: tuple[Seat, ...]):
        self.seats, self.at = seats, 0


class Seats:
    """Chooses seats. A request has one of each node's for all of its calls, the one that fewest others have; where
    walks have places of their own, one of each place's; or, where the node's seats are split by context, each of its
    contexts has its own. What continues a session, or takes over a sibling's prompt, goes where that is.

    :param lives: whether a rank can be used now.
    """

    def __init__(self, plan: Plan, layout: Layout, lives: Callable[[int], bool]):
        self.layout, self._lives = layout, lives
        self._node_of = {name: nodes[0] for name, nodes in users_of(plan.graph).items()}
        self.companions = companions(plan.graph)
        contexts: dict[str, set[str]] = {}
        self._stage_of: dict[CallOp, int] = {}
        for walk, program in plan.programs.items():
            for op in program:
                if isinstance(op, CallOp):
                    contexts.setdefault(op.call.node, set()).add(op.call.context)
                    stage = layout.stage(op.call.node, walk, bool(op.loops))
                    if stage is not None:
                        self._stage_of[op] = stage
        self._contexts = {node: sorted(found) for node, found in contexts.items()}
        self._chosen: dict[str, dict[tuple[Seat, ...], int]] = {}  # request or session key → by the seats of a node
        self._paths: dict[str, dict[tuple[str, ...], _Path]] = {}  # the same → by nodes that move together
        self._keys: dict[str, str] = {}  # request → the session that it continues
        self._loads: Counter[Seat] = Counter()

    def assign(self, request: EngineRequest, session: str | None) -> None:
        """*request* is about to be admitted."""
        if session is not None:
            self._keys[request.id] = session
            return
        if request.id in self._chosen or request.id in self._paths:
            return
        sibling = self._chosen.get(request.sibling_of or "")
        if sibling is not None:
            self._chosen[request.id] = dict(sibling)
            self._loads.update(seats[index] for seats, index in sibling.items())
        paths = self._paths.get(request.sibling_of or "")
        if paths is not None:
            self._paths[request.id] = {nodes: _Path(path.seats) for nodes, path in paths.items()}
            self._loads.update(seat for path in paths.values() for seat in path.seats)

    def forget(self, key: str) -> None:
        """The request or session *key* is no more, or has to wait."""
        self._keys.pop(key, None)
        for seats, index in self._chosen.pop(key, {}).items():
            self._loads[seats[index]] -= 1
        for path in self._paths.pop(key, {}).values():
            self._loads.subtract(path.seats)

    def of_pool(self, resource: str, owner: Owner) -> Seat:
        """Where *owner*'s state of *resource* is."""
        return self._seat(self._node_of[resource], owner.key, owner.context)

    def all_of_owner(self, resource: str, owner: Owner) -> tuple[Seat, ...]:
        """Where *owner*'s state of *resource* is, and where it will be."""
        node = self._node_of[resource]
        if node not in self.layout.by_walk:
            return (self.of_pool(resource, owner),)
        path = self._path(node, owner.key)
        return tuple(dict.fromkeys(path.seats[path.at :]))

    def of_call(self, call: CallRun) -> Seat:
        """Which seat runs *call*."""
        return self._seat(call.op.call.node, call.run.request.id, call.op.call.context)

    def target(self, call: CallRun) -> Seat:
        """Where the state that *call* uses is to be: :meth:`of_call`, or another seat, to which it moves first."""
        stage = self._stage_of.get(call.op)
        if stage is None:
            return self.of_call(call)
        path = self._path(call.op.call.node, call.run.request.id)
        return path.seats[max(stage, path.at)]

    def moved(self, call: CallRun) -> None:
        """*call*'s state is at its :meth:`target`."""
        path = self._path(call.op.call.node, call.run.request.id)
        path.at = max(path.at, self._stage_of[call.op])

    def moves(self, resource: str, node: str) -> bool:
        """Whether the state of *resource* moves when that of *node* does."""
        return self._node_of.get(resource) in self.companions[node]

    def always_here(self, op: CallOp) -> bool:
        """Whether rank 0 runs every call of *op*, alone or with others."""
        seats = self.layout.seats[op.call.node]
        stage = self._stage_of.get(op)
        if stage is not None:  # whose state is further may not come back
            seats = tuple(seat for later in self.layout.stages(op.call.node)[stage:] for seat in later)
        return all(seat == seats[0] for seat in seats) and 0 in seats[0].ranks

    def all_of_pool(self, resource: str) -> tuple[Seat, ...]:
        """Which seats have a pool of *resource*; one that no node uses is rank 0's."""
        node = self._node_of.get(resource)
        return (Seat(),) if node is None else self.layout.seats[node]

    def _seat(self, node: str, key: str, context: str) -> Seat:
        seats = self.layout.seats[node]
        if len(seats) == 1:
            return seats[0]
        if node in self.layout.by_context:
            return seats[self._contexts[node].index(context) % len(seats)]
        if node in self.layout.by_walk:
            path = self._path(node, key)
            return path.seats[path.at]
        return seats[self._choice(seats, self._keys.get(key, key))]

    def _choice(self, seats: tuple[Seat, ...], key: str) -> int:
        chosen = self._chosen.setdefault(key, {})
        index = chosen.get(seats)
        if index is None:
            index = chosen[seats] = seats.index(self._idlest(seats))
            self._loads[seats[index]] += 1
        return index

    def _path(self, node: str, key: str) -> _Path:
        paths = self._paths.setdefault(self._keys.get(key, key), {})
        path = paths.get(self.companions[node])
        if path is None:
            seats: list[Seat] = []
            for stage in self.layout.stages(node):  # who need not move stays
                seats.append(seats[-1] if seats and seats[-1] in stage else self._idlest(stage))
            path = paths[self.companions[node]] = _Path(tuple(seats))
            self._loads.update(seats)
        return path

    def _idlest(self, seats: tuple[Seat, ...]) -> Seat:
        living = [seat for seat in seats if all(map(self._lives, seat.ranks))]
        return min(living or seats, key=lambda seat: self._loads[seat])


class SeatedPool(Resource):
    """The books of a pool that each seat of a node has one of. It only keeps books: steps are planned by the pools.

    Where an owner's state is to move, there is a reservation wherever it will be.
    """

    def __init__(self, resource: str, first: Resource, seats: Seats):
        super().__init__(resource, first.spec, first.context)
        self.kind, self.looks_at = first.kind, first.looks_at
        self._seats = seats
        self.pools: dict[Seat, Resource] = {}
        self._held: dict[Owner, list[Seat]] = {}

    def held(self, owner: Owner) -> Sequence[Seat]:
        """The seats where *owner* has a reservation, that of its state first."""
        return self._held.get(owner, ())

    def _pool(self, owner: Owner) -> Resource:
        return self._pool_at(self._seats.of_pool(self.name, owner))

    def _pool_at(self, seat: Seat) -> Resource:
        if seat not in self.pools:
            raise RequestError(
                f"{seat}, which holds {self.name!r}, is not there; try again", code="not_ready", status=503
            )
        return self.pools[seat]

    @property
    def _any(self) -> Resource:
        return next(iter(self.pools.values()))

    def units(self, tokens: int) -> int:
        return self._any.units(tokens)

    def capacity(self) -> int:
        """Of one pool: a context lies in one."""
        return min(pool.capacity() for pool in self.pools.values())

    def reserve(self, owner: Owner, units: int) -> bool:
        here, *later = self._seats.all_of_owner(self.name, owner)
        known = self._held.get(owner, [])
        new: list[Seat] = []  # that of the state comes last: what a session has there cannot be given back
        complete = False
        try:
            for seat in (*later, here):
                wanted = units if seat == here else self.units_ahead(owner, units)
                if not self._pool_at(seat).reserve(owner, wanted):
                    return False
                if seat not in known:
                    new.append(seat)
            complete = True
        finally:
            if not complete:
                for seat in new:
                    self.pools[seat].close(owner)
        self._held[owner] = [here, *later]
        return True

    def units_ahead(self, owner: Owner, units: int) -> int:
        """What *owner*, which is to have *units* more, needs where its state will move: all of it."""
        most, longest = self.capacity(), getattr(self.spec, "max_tokens", None)
        if longest is not None:
            most = min(most, self.units(longest))
        return min(units + self._pool(owner).taken(owner), max(most, units))

    def open(self, owner: Owner, request: EngineRequest) -> None:
        self._pool(owner).open(owner, request)

    def taken(self, owner: Owner) -> int:
        return self._pool(owner).taken(owner)

    def follow(self, owner: Owner, tokens: int) -> None:
        self._pool(owner).follow(owner, tokens)

    def close(self, owner: Owner) -> None:
        for seat in self._held.pop(owner):
            self.pools[seat].close(owner)

    def settle(self, owner: Owner) -> Sequence[Seat]:
        """*owner*'s request has ended and its state stays where it is, for a session: returns the seats where it has no
        reservation any more."""
        here, *later = self._held[owner]
        for seat in later:
            self.pools[seat].close(owner)
        self._held[owner] = [here]
        return later

    def leave(self, owner: Owner, seat: Seat) -> None:
        """*owner*'s state has gone on to the next place, and holds nothing at *seat* any more."""
        self._held[owner].remove(seat)
        self.pools[seat].close(owner)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return self._pool(owner).match(owner, ids, sibling)

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        self._pool(owner).skip(owner, ids, sibling)

    def missed(self, owner: Owner, tokens: int) -> None:
        self._pool(owner).missed(owner, tokens)

    def cut(self, owner: Owner, tokens: int) -> int:
        return self._pool(owner).cut(owner, tokens)

    @property
    def cuts_calls(self) -> bool:
        return self._any.cuts_calls

    def portion(self, owner: Owner, start: int, most: int) -> tuple[int, int] | None:
        return self._pool(owner).portion(owner, start, most)

    def lookups(self) -> tuple[int, int] | None:
        each = [found for pool in self.pools.values() if (found := pool.lookups()) is not None]
        return (sum(asked for asked, _ in each), sum(hits for _, hits in each)) if each else None

    def retract(self, row: Any) -> None:
        self._pool(row.owner).retract(row)

    def plan(self, rows: Sequence[Any], frozen: bool = False) -> Any:
        raise NotImplementedError("steps are planned by the pools themselves")

    def usage(self) -> Usage:
        each = [pool.usage() for pool in self.pools.values()]
        return Usage(sum(u.used for u in each), sum(u.total for u in each), sum(u.cached for u in each))

    def checkpoint_counts(self) -> Mapping[str, int] | None:
        each = [found for pool in self.pools.values() if (found := pool.checkpoint_counts()) is not None]
        return {key: sum(found[key] for found in each) for key in each[0]} if each else None

    def check(self, owners: Sequence[Owner]) -> None:
        if {*owners} != {*self._held}:
            raise IntegrityError(f"{self.name!r} is held by {sorted(self._held)} but open owners are {sorted(owners)}")
        for seat, pool in self.pools.items():
            pool.check([owner for owner in owners if seat in self._held[owner]])
