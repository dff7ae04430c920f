"""Rank 0's view of the other ranks: which of them are there, and what each holds of whom.

Rank 0 has the scheduler, the walks and the streams of all requests, and nodes of its own as any rank. It keeps the
books of all pools; the other ranks are told of requests that come to them and of what becomes of their state. Their
steps are :mod:`mstar.worker.rank_steps`, their values :mod:`mstar.worker.rank_values`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from mstar.cluster.base import WorkerConfig
from mstar.graph.calls import CallRun
from mstar.registry import Registry
from mstar.resources.base import Owner, Resource
from mstar.spec.placement import Seat
from mstar.spec.request import EngineRequest
from mstar.worker.build import Built
from mstar.worker.declared import declared_resources
from mstar.worker.messages import (
    Close,
    Exported,
    FromRank,
    Landed,
    Learn,
    Match,
    Met,
    Missed,
    Open,
    Rewind,
    Seek,
    Skip,
    ToRank,
)
from mstar.worker.rank_links import Link, Peer
from mstar.worker.rank_steps import RankSteps
from mstar.worker.rank_values import RankValues
from mstar.worker.routing import Routing
from mstar.worker.seats import SeatedPool, Seats
from mstar.worker.sessions import Session
from mstar.worker.shadow import shadow_pools
from mstar.worker.tensor_channel import TensorChannel

__all__ = ["Ranks", "coordinate"]

_HERE = 0


class Ranks:
    """The other ranks of a layout.

    :ivar steps: what they run. :ivar values: what they have.
    :param pools: the pools of this rank, by name. :param shadows: makes the books of pools elsewhere, from their
        capacities. :param values: how tensors are to pass (``engine.values``).
    """

    def __init__(
        self,
        routing: Routing,
        pools: Mapping[str, Resource],
        shadows: Callable[[Mapping[str, int]], dict[str, Resource]],
        device: torch.device,
        values: str | None = None,
    ):
        self.routing, self._shadows, self._device, self._asked = routing, shadows, device, values
        self.layout = routing.layout
        graph = routing.plan.graph
        self._kept = frozenset(graph.sessions)
        self.seats = Seats(routing.plan, self.layout, lambda rank: rank == _HERE or rank in self._links)
        self.books: dict[str, Resource] = {}
        """The pools that requests are admitted by: those of this rank, and shadows of the others'."""
        self._links: dict[int, Link] = {}
        for name, pool in pools.items():
            self._book(name, _HERE, pool)
        self._touched: dict[str, set[int]] = {}  # request → ranks that know of it
        self._bound: dict[str, set[int]] = {}  # request → ranks that hold something of it which is nowhere else
        self._looked_at: dict[int, list[Collection[str] | None]] = {}  # rank → inputs that its resources read
        self.values = RankValues(self._links, device)
        self.steps = RankSteps(self, routing, self._links, self.values, device)

    # --- ranks come and go --------------------------------------------------------------------------------------------
    def link(self, rank: int, peer: Peer, facts: Mapping[str, Any]) -> None:
        """*rank* is ready. *facts*: what its follower said of itself."""
        link = self._links[rank] = Link(peer, TensorChannel(0, self._device))
        link.meet(rank, self._asked, facts)
        capacities = facts["capacities"]
        elsewhere = {name: units for name, units in capacities.items() if _HERE not in self._seat_at(name, rank).ranks}
        for name, shadow in self._shadows(elsewhere).items():
            self._book(name, rank, shadow)

    def _seat_at(self, resource: str, rank: int) -> Seat:
        """Which of the seats that have a pool of *resource* *rank* belongs to."""
        return next(seat for seat in self.seats.all_of_pool(resource) if rank in seat.ranks)

    def _book(self, name: str, rank: int, pool: Resource) -> None:
        """Keep the books of resource *name* on *rank* by *pool*."""
        if len(self.seats.all_of_pool(name)) == 1:
            self.books[name] = pool
            return
        seated = self.books.get(name)
        if not isinstance(seated, SeatedPool):
            seated = self.books[name] = SeatedPool(name, pool, self.seats)
        seated.pools[self._seat_at(name, rank)] = pool

    def lost(self, rank: int, holdings: Mapping[str, Sequence[tuple[str, Owner]]] | None = None) -> set[str]:
        """*rank* has died: nothing is sent to it any more. Returns the requests that cannot go on without it.

        :param holdings: request → (resource, owner) each.
        """
        link = self._links.pop(rank, None)
        if link is not None:
            link.channel.close()
        gone = {request for request, ranks in self._bound.items() if rank in ranks}
        for request, owners in (holdings or {}).items():
            if any(rank in seat.ranks for name, owner in owners for seat in self._held(name, owner)):
                gone.add(request)
        gone |= self.steps.lost(rank)
        for ranks in (*self._touched.values(), *self._bound.values()):
            ranks.discard(rank)
        return gone

    def lives_at(self, resource: str, owner: Owner) -> bool:
        """Whether the ranks that *owner*'s state of *resource* is to lie on are there."""
        ranks = {rank for seat in self.seats.all_of_owner(resource, owner) for rank in seat.ranks}
        return all(rank == _HERE or rank in self._links for rank in ranks)

    def _held(self, resource: str, owner: Owner) -> Sequence[Seat]:
        """The seats that have a reservation for *owner*, that of its state first."""
        pool = self.books[resource]
        return pool.held(owner) if isinstance(pool, SeatedPool) else (self.seats.of_pool(resource, owner),)

    def at(self, rank: int, resource: str, owner: Owner) -> bool:
        """Whether *owner*'s state of *resource* lies on *rank*."""
        return rank in self.seats.of_pool(resource, owner).ranks

    def ready(self) -> bool:
        """Whether all ranks are there."""
        return len(self._links) == self.layout.ranks - 1

    def decide(self, request: EngineRequest) -> None:
        """Decide what chance decides of *request*, before it reaches the ranks: each samples by itself."""
        for name, params in request.sampling.items():
            if params.seed is None:
                request.sampling[name] = msgspec.structs.replace(params, seed=secrets.randbits(63))

    # --- requests -----------------------------------------------------------------------------------------------------
    def opened(self, request: EngineRequest, needs: Iterable[tuple[str, Owner, int]]) -> None:
        """*request* holds (resource, owner, units) each."""
        now: dict[int, list[tuple[str, str, str, int]]] = {}
        later: dict[int, list[tuple[str, str, str, int]]] = {}
        for name, owner, units in needs:
            pool = self.books[name]
            for number, seat in enumerate(self._held(name, owner)):
                wanted = pool.units_ahead(owner, units) if number and isinstance(pool, SeatedPool) else units
                for rank in seat.ranks:
                    if rank != _HERE:
                        (later if number else now).setdefault(rank, []).append((name, *owner, wanted))
        for rank in {*now, *later}:
            self._touched.setdefault(request.id, set()).add(rank)
            mine = msgspec.structs.replace(request, inputs=self._inputs_of(rank, request))
            self.tell(rank, Open(request=mine, needs=now.get(rank, []), later=later.get(rank, [])))

    def _inputs_of(self, rank: int, request: EngineRequest) -> dict[str, Any]:
        """What the resources of *rank* look at of *request*'s inputs; what its nodes read comes with their steps."""
        if rank not in self._looked_at:
            there = {name for name in self.books if any(rank in seat.ranks for seat in self.seats.all_of_pool(name))}
            self._looked_at[rank] = [self.books[name].inputs() for name in sorted(there)]
        looked_at = self._looked_at[rank]
        return {
            name: value
            for name, value in request.inputs.items()
            if any(names is None or name in names for names in looked_at)
        }

    def closing(self, owners: Iterable[tuple[str, Owner]]) -> None:
        """(resource, owner) each are about to be free again."""
        self._tell_closed((name, owner, self._held(name, owner)) for name, owner in owners)

    def settle(self, owners: Iterable[tuple[str, Owner]], told: bool) -> None:
        """A session keeps (resource, owner) each where they are, and nothing where they were to go. *told*: the other
        ranks know of it."""
        left = []
        for name, owner in owners:
            pool = self.books[name]
            if isinstance(pool, SeatedPool):
                left.append((name, owner, pool.settle(owner)))
        if told:
            self._tell_closed(left)

    def _tell_closed(self, closed: Iterable[tuple[str, Owner, Sequence[Seat]]]) -> None:
        by_rank: dict[int, list[tuple[str, str, str]]] = {}
        for name, owner, seats in closed:
            for rank in (rank for seat in seats for rank in seat.ranks if rank != _HERE):
                by_rank.setdefault(rank, []).append((name, owner.key, owner.context))
        for rank, mine in by_rank.items():
            self.tell(rank, Close(owners=mine))

    def ended(self, request: str) -> None:
        """*request* has ended and holds nothing any more."""
        self._bound.pop(request, None)
        self.seats.forget(request)
        for rank in self._touched.pop(request, ()):
            self.tell(rank, Close(owners=[], request=request))

    def rewind(self, resource: str, owner: Owner, tokens: int, complete: bool = True) -> bool:
        """Take back *owner*'s last tokens on other ranks. Returns whether this rank has a pool to do it in, too."""
        for rank in self.seats.of_pool(resource, owner).ranks:
            if rank != _HERE:
                self.tell(
                    rank, Rewind(resource=resource, owner=(owner.key, owner.context), tokens=tokens, complete=complete)
                )
        here = _HERE in self.seats.of_pool(resource, owner).ranks
        if not here:
            self.books[resource].follow(owner, -tokens)
        return here

    def learn(self, resource: str, owner: Owner, ids: Sequence[int]) -> None:
        """The other ranks of the mesh learn what this one has learnt."""
        for rank in self.seats.of_pool(resource, owner).ranks:
            if rank != _HERE:
                self.tell(rank, Learn(resource=resource, owner=(owner.key, owner.context), ids=list(ids)))

    def skipped(self, resource: str, owner: Owner, ids: Sequence[int], sibling: Owner | None) -> None:
        """The other ranks of the mesh skip what this one has skipped."""
        for rank in self.seats.of_pool(resource, owner).ranks:
            if rank != _HERE:
                other = None if sibling is None else (sibling.key, sibling.context)
                self.tell(rank, Skip(resource=resource, owner=(owner.key, owner.context), ids=list(ids), sibling=other))

    def matched(self, resource: str, owner: Owner, ids: Sequence[int], sibling: Owner | None) -> None:
        """The other ranks of the mesh look for what this one has looked for."""
        for rank in self.seats.of_pool(resource, owner).ranks:
            if rank != _HERE:
                other = None if sibling is None else (sibling.key, sibling.context)
                named = (owner.key, owner.context)
                self.tell(rank, Match(resource=resource, owner=named, ids=list(ids), sibling=other))

    def missed(self, resource: str, owner: Owner, tokens: int) -> None:
        """The other ranks of the mesh are told what this one was told."""
        for rank in self.seats.of_pool(resource, owner).ranks:
            if rank != _HERE:
                self.tell(rank, Missed(resource=resource, owner=(owner.key, owner.context), tokens=tokens))

    def seek(self, number: int, call: CallRun, ids: Sequence[int]) -> None:
        """Have the ranks that run *call* skip what they know of its prompt *ids*; the first of them answers."""
        request = call.run.request
        op, session = self.routing.number_of[call.op], self.session_key(request)
        for rank in self.seats.of_call(call).ranks:
            self.touch(rank, request.id)
            self.tell(
                rank,
                Seek(
                    number=number,
                    request=request.id,
                    op=op,
                    session=session,
                    ids=list(ids),
                    sibling=request.sibling_of,
                ),
            )
        self.flush()

    def here(self, call: CallRun) -> bool:
        """Whether this rank runs *call*, alone or with others."""
        return _HERE in self.seats.of_call(call).ranks

    # --- for steps ----------------------------------------------------------------------------------------------------
    def owner_of(self, call: CallRun, resource: str) -> Owner:
        """Whose state of *resource* *call* uses."""
        session = self.session_key(call.run.request) if resource in self._kept else None
        return Owner(session or call.run.request.id, call.op.call.context)

    def skipped_elsewhere(self, call: CallRun, tokens: int) -> None:
        """The ranks that run *call* have taken over so many tokens of its prompt."""
        if tokens:
            for name in call.op.entry.resources:
                self.books[name].follow(self.owner_of(call, name), tokens)

    def session_key(self, request: EngineRequest) -> str | None:
        """The key of the state that *request*'s session keeps, if any."""
        if request.session is None or not self._kept:
            return None
        return Session(request.session, request.tenant, 0.0).key

    def touch(self, rank: int, request: str) -> None:
        """*rank* is to know of *request*, if only that there is one."""
        ranks = self._touched.setdefault(request, set())
        if rank not in ranks:
            ranks.add(rank)
            self.tell(rank, Open(request=EngineRequest(id=request), needs=[]))

    def bind(self, request: str, ranks: Iterable[int]) -> None:
        """*request* cannot go on without what *ranks* have computed for it."""
        self._bound.setdefault(request, set()).update(ranks)

    # --- large tensors ------------------------------------------------------------------------------------------------
    def channel(self, rank: int) -> TensorChannel | None:
        """The way for large tensors to *rank*; ``None`` to this one, and to one that is gone."""
        link = self._links.get(rank)
        return None if link is None else link.channel

    def resolve(self, message: FromRank) -> FromRank:
        """*message*, which has just come, with the tensors that are announced in it."""
        if isinstance(message, Landed | Exported) and (link := self._links.get(message.rank)) is not None:
            return link.resolve(message)
        return message

    def met(self, message: Met) -> None:
        """A rank has opened its end of the channel, or could not."""
        if (link := self._links.get(message.rank)) is not None:
            link.met(message.fault)

    def look(self) -> None:
        """See what has passed."""
        for link in self._links.values():
            link.look()

    @property
    def busy(self) -> bool:
        """Whether something is on its way, of which nobody will tell."""
        return any(link.channel.busy for link in self._links.values())

    @property
    def hurries(self) -> bool:
        """Whether what comes is worth looking for again at once."""
        return any(link.channel.hurries for link in self._links.values())

    # --- sending ------------------------------------------------------------------------------------------------------
    def tell(self, rank: int, message: ToRank) -> None:
        """Send *message* to *rank* with what goes there next."""
        link = self._links.get(rank)
        if link is not None:  # a rank that has died has forgotten it all
            link.outbox.append(message)

    def flush(self) -> None:
        """Send what was told since."""
        for link in self._links.values():
            link.flush()

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "flying": link.flying,
                "way": link.channel.way,
                "opening": not link.settled,
                "lane_bytes": {"sent": link.channel.sent, "received": link.channel.received},
            }
            for rank, link in sorted(self._links.items())
        ]


def coordinate(built: Built, config: WorkerConfig, registry: Registry) -> Ranks | None:
    """What rank 0 of *built*'s layout needs beside a worker; ``None`` where it is the only one."""
    if built.layout.ranks == 1:
        return None
    deployment = config.deployment
    declared, _ = declared_resources(built.model, deployment)

    def shadows(capacities: Mapping[str, int]) -> dict[str, Resource]:
        return shadow_pools(declared, capacities, built.plan, deployment, registry, built.device, built.dtype)

    return Ranks(Routing(built.plan, built.layout), built.resources, shadows, built.device, deployment.engine.values)
