"""Nodes that several seats of a layout each have all of: which seat serves a call, and the books of their pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp, Plan
from mstar.resources.base import Owner, Resource, Usage
from mstar.spec.errors import RequestError
from mstar.spec.placement import Layout, Seat, users_of
from mstar.spec.request import EngineRequest

__all__ = ["SeatedPool", "Seats"]


class Seats:
    """Chooses seats. A request has one of each node's for all of its calls, the one that fewest others have; or, where
    the node's seats are split by context, each of its contexts has its own. What continues a session, or takes over a
    sibling's prompt, goes where that is.

    :param lives: whether a rank can be used now.
    """

    def __init__(self, plan: Plan, layout: Layout, lives: Callable[[int], bool]):
        self.layout, self._lives = layout, lives
        self._node_of = {name: nodes[0] for name, nodes in users_of(plan.graph).items()}
        contexts: dict[str, set[str]] = {}
        for program in plan.programs.values():
            for op in program:
                if isinstance(op, CallOp):
                    contexts.setdefault(op.call.node, set()).add(op.call.context)
        self._contexts = {node: sorted(found) for node, found in contexts.items()}
        self._chosen: dict[str, dict[tuple[Seat, ...], int]] = {}  # request or session key → by the seats of a node
        self._keys: dict[str, str] = {}  # request → the session that it continues
        self._loads: Counter[Seat] = Counter()

    def assign(self, request: EngineRequest, session: str | None) -> None:
        """*request* is about to be admitted."""
        if session is not None:
            self._keys[request.id] = session
        sibling = self._chosen.get(request.sibling_of or "")
        if sibling is not None and request.id not in self._chosen and session is None:
            self._chosen[request.id] = dict(sibling)
            self._loads.update(seats[index] for seats, index in sibling.items())

    def forget(self, key: str) -> None:
        """The request or session *key* is no more, or has to wait."""
        self._keys.pop(key, None)
        for seats, index in self._chosen.pop(key, {}).items():
            self._loads[seats[index]] -= 1

    def of_pool(self, resource: str, owner: Owner) -> Seat:
        """Where *owner*'s state of *resource* is."""
        return self._seat(self._node_of[resource], owner.key, owner.context)

    def of_call(self, call: CallRun) -> Seat:
        """Which seat runs *call*."""
        return self._seat(call.op.call.node, call.run.request.id, call.op.call.context)

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
        return seats[self._choice(seats, self._keys.get(key, key))]

    def _choice(self, seats: tuple[Seat, ...], key: str) -> int:
        chosen = self._chosen.setdefault(key, {})
        index = chosen.get(seats)
        if index is None:
            living = [n for n, seat in enumerate(seats) if all(map(self._lives, seat.ranks))]
            index = chosen[seats] = min(living or range(len(seats)), key=lambda n: self._loads[seats[n]])
            self._loads[seats[index]] += 1
        return index


class SeatedPool(Resource):
    """The books of a pool that each seat of a node has one of. It only keeps books: steps are planned by the pools.

    :param at: the seat of an owner.
    """

    def __init__(self, resource: str, first: Resource, at: Callable[[str, Owner], Seat]):
        super().__init__(resource, first.spec, first.context)
        self.kind = first.kind
        self._at = at
        self.pools: dict[Seat, Resource] = {}

    def _pool(self, owner: Owner) -> Resource:
        seat = self._at(self.name, owner)
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
        return self._pool(owner).reserve(owner, units)

    def open(self, owner: Owner, request: EngineRequest) -> None:
        self._pool(owner).open(owner, request)

    def close(self, owner: Owner) -> None:
        self._pool(owner).close(owner)

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return self._pool(owner).match(owner, ids, sibling)

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None:
        self._pool(owner).skip(owner, ids, sibling)

    def missed(self, owner: Owner, tokens: int) -> None:
        self._pool(owner).missed(owner, tokens)

    def cut(self, owner: Owner, tokens: int) -> int:
        return self._pool(owner).cut(owner, tokens)

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
        for seat, pool in self.pools.items():
            pool.check([owner for owner in owners if self._at(self.name, owner) == seat])
