"""Rank 0's view of the other ranks: which of them runs a step, what it lacks for it, and what came of it.

Rank 0 has the scheduler, the walks and the streams of all requests, and nodes of its own as any rank. A step whose node
lies elsewhere is sent there and lands when the rank answers; meanwhile this rank and others run theirs. A step of a
mesh that rank 0 belongs to is told to the others and then run here as any step: all run it in lockstep.

Each rank has at most one step that decodes on its way, so that those that are ready meanwhile join the next, and at
most two others, so that it need not wait for rank 0: that is the back-pressure.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.cluster.base import WorkerConfig
from mstar.engine.engine import Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.graph.values import Ref
from mstar.registry import Registry
from mstar.resources.base import IntegrityError, Owner, Resource
from mstar.resources.staging import Late, to_device
from mstar.spec.placement import Seat
from mstar.spec.request import EngineRequest, Failed
from mstar.worker.build import Built, declared_resources
from mstar.worker.handles import Handle, pack, unpack
from mstar.worker.messages import (
    Agreed,
    Close,
    Contents,
    Fetch,
    Fetched,
    FromRank,
    Landed,
    Learn,
    Match,
    Missed,
    Open,
    Part,
    Refused,
    Rewind,
    Row,
    Run,
    Seek,
    Skip,
    ToRank,
)
from mstar.worker.rank_links import Away, Link, Peer, RankLost
from mstar.worker.routing import DOUBT_S, Routing
from mstar.worker.seats import SeatedPool, Seats
from mstar.worker.sessions import Session
from mstar.worker.shadow import shadow_pools

__all__ = ["Landing", "Ranks", "coordinate"]

_HERE = 0
_CPU = torch.device("cpu")
_FETCH_S = 60.0


@dataclass(slots=True)
class Landing:
    """A step of another rank that is done. *results*: for each of *work*, in order."""

    work: Sequence[Work]
    results: Sequence[RowResult | Failed]
    seconds: float


@dataclass(slots=True)
class _Flying:
    """A step that other ranks run. *failed*: rank → indices of the calls that failed there."""

    work: Sequence[Work]
    seat: Seat
    waiting: set[int]
    decodes: bool
    failed: dict[int, frozenset[int]] = field(default_factory=dict)


class Ranks:
    """The other ranks of a layout.

    :param pools: the pools of this rank, by name. :param shadows: makes the books of pools elsewhere, from their
        capacities.
    """

    def __init__(
        self,
        routing: Routing,
        pools: Mapping[str, Resource],
        shadows: Callable[[Mapping[str, int]], dict[str, Resource]],
        device: torch.device,
    ):
        self.routing, self._shadows, self._device = routing, shadows, device
        self.layout = routing.layout
        graph = routing.plan.graph
        self._kept = frozenset(graph.sessions)
        self.seats = Seats(routing.plan, self.layout, lambda rank: rank == _HERE or rank in self._links)
        self.books: dict[str, Resource] = {}
        """The pools that requests are admitted by: those of this rank, and shadows of the others'."""
        self._links: dict[int, Link] = {}
        for name, pool in pools.items():
            self._book(name, _HERE, pool)
        self._steps, self._sent = itertools.count(1), itertools.count(1)
        self._flying: dict[int, _Flying] = {}
        self._touched: dict[str, set[int]] = {}  # request → ranks that know of it
        self._bound: dict[str, set[int]] = {}  # request → ranks that hold something of it which is nowhere else
        self._looked_at: dict[int, list[Collection[str] | None]] = {}  # rank → inputs that its resources read
        self._stash: list[FromRank] = []
        self._mirrored: int | None = None
        self._doubts: dict[int, float] = {}  # steps of a mesh that failed here → when the others must have, too

    # --- ranks come and go --------------------------------------------------------------------------------------------
    def link(self, rank: int, peer: Peer, facts: Mapping[str, Any]) -> None:
        """*rank* is ready. *facts*: what its follower said of itself."""
        self._links[rank] = Link(peer)
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
        self._links.pop(rank, None)
        gone = {request for request, ranks in self._bound.items() if rank in ranks}
        for request, owners in (holdings or {}).items():
            if any(rank in seat.ranks for name, owner in owners for seat in self._held(name, owner)):
                gone.add(request)
        for step in [step for step, flying in self._flying.items() if rank in flying.seat.ranks]:
            flying = self._flying.pop(step)
            gone.update(w.call.run.request.id for w in flying.work)
            for other in flying.waiting:
                self._landed(other, flying)
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

    def retracted(self, flight: Flight, index: int) -> None:
        """This rank has retracted the *index*-th call of *flight*; those that ran it with this one do so, too."""
        if not flight.step:
            return
        frozen = flight.work[index].call.op.entry.frozen
        for resource, rows in zip(flight.used, flight.rows, strict=True):
            if resource.name not in frozen:
                row = rows[index]
                self.rewind(resource.name, row.owner, row.length, row.complete)

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
        op, session = self.routing.number_of[call.op], self._session_key(request)
        for rank in self.seats.of_call(call).ranks:
            self._touch(rank, request.id)
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

    # --- steps --------------------------------------------------------------------------------------------------------
    def group(self, call: CallRun) -> tuple[Any, ...]:
        """Calls of one group may share a step: they run on the same seat."""
        return (*call.group, self.seats.of_call(call))

    def may_run_here(self, group: tuple[Any, ...]) -> bool:
        """Whether a step of *group* can begin now, and this rank has a part in it."""
        ranks = group[-1].ranks
        return _HERE in ranks and all(rank == _HERE or rank in self._links for rank in ranks)

    def may_run_elsewhere(self, group: tuple[Any, ...]) -> bool:
        """Whether a step of *group* can begin now, on other ranks alone."""
        ranks = group[-1].ranks
        return _HERE not in ranks and all(rank in self._links and self._links[rank].has_room for rank in ranks)

    def dispatch(self, work: Sequence[Work]) -> None:
        """Tell the other ranks of a step what to run."""
        self._mirrored = None
        seat = self.seats.of_call(work[0].call)
        others = [rank for rank in seat.ranks if rank != _HERE]
        if not others:
            return
        step, here = next(self._steps), _HERE in seat.ranks
        decodes = any(w.call.decode for w in work)
        if not here:
            self._follow(work)
        self._flying[step] = _Flying(work, seat, set(others), decodes)
        for rank in others:
            link = self._links[rank]
            for w in work:
                self._touch(rank, w.call.run.request.id)
            values: list[Contents] = []
            rows = [self._row(w, rank, link, values) for w in work]
            answers = not here and rank == seat.ranks[0]
            link.outbox.append(Run(step=step, rows=rows, values=values, answers=answers))
            link.flying += 1
            link.decoding += decodes
            link.flush()
        self._mirrored = step if here else None

    def _follow(self, work: Sequence[Work]) -> None:
        """Keep the books of what a step elsewhere commits."""
        entry = work[0].call.op.entry
        for name in entry.resources:
            if name not in entry.frozen:
                for w in work:
                    self.books[name].follow(self._owner_of(w.call, name), w.tokens)

    def _owner_of(self, call: CallRun, resource: str) -> Owner:
        session = self._session_key(call.run.request) if resource in self._kept else None
        return Owner(session or call.run.request.id, call.op.call.context)

    def skipped_elsewhere(self, call: CallRun, tokens: int) -> None:
        """The ranks that run *call* have taken over so many tokens of its prompt."""
        if tokens:
            for name in call.op.entry.resources:
                self.books[name].follow(self._owner_of(call, name), tokens)

    def launched(self, flights: Sequence[Flight]) -> None:
        """This rank has launched the step that was dispatched last: the others name its outputs alike."""
        step, self._mirrored = self._mirrored, None
        if step is None:
            return
        seat, first = self._flying[step].seat, 0
        for flight in flights:
            found: dict[int, Away] = {}
            for key, ref in self.routing.bases(step, first, flight):
                found[id(ref.base)] = self._away(key, [rank for rank in seat.ranks if rank != _HERE])
            for result in flight.outcome.results if flight.outcome is not None else ():
                for ref in (result.outputs or {}).values():
                    ref.away = found[id(ref.base)]
            flight.step = step
            flight.first = first
            first += len(flight.work)

    def landed_here(self, flight: Flight, results: Sequence[RowResult | Exception]) -> None:
        """*flight*, which a mesh runs, has landed on this rank."""
        flying = self._flying.get(flight.step)
        if flying is None:
            return
        failed = {flight.first + i for i, result in enumerate(results) if isinstance(result, Exception)}
        flying.failed[_HERE] = flying.failed.get(_HERE, frozenset()) | failed
        if failed and flight.step not in self._doubts:
            self._doubts[flight.step] = time.monotonic() + DOUBT_S
            for rank in flying.seat.ranks:
                if rank != _HERE:
                    self.tell(rank, Agreed(step=flight.step))
        if flight.first + len(flight.work) == len(flying.work):
            self._compare(flight.step, flying)

    def _row(self, w: Work, rank: int, link: Link, values: list[Contents]) -> Row:
        call = w.call
        request = call.run.request
        session = self._session_key(request)
        inputs = {}
        if not call.chunks:  # the rank keeps those of a call that is cut
            inputs = {port: self._given(value, rank, link, values) for port, value in call.inputs.items()}
        return Row(
            request.id, self.routing.number_of[call.op], session, call.length, w.start, w.tokens, w.complete, inputs
        )

    def _session_key(self, request: EngineRequest) -> str | None:
        if request.session is None or not self._kept:
            return None
        return Session(request.session, request.tenant, 0.0).key

    def _given(self, value: Any, rank: int, link: Link, values: list[Contents]) -> Any:
        if not isinstance(value, Ref):
            return value
        away = value.away
        if away is None:
            away = value.away = Away(self._fetch)
        held = away.held.get(rank)
        if held is None or not held[0].goes_to(link.dropped):  # what a rank had that has died since, it has no more
            handle = Handle(-next(self._sent), link.dropped)
            values.append(pack(handle.key, value.items()))
            away = value.away = away.copy()  # others that lie in the same tensor are not sent with it
            held = away.held[rank] = (handle, value.start)
        handle, begins = held
        host = value.host if value.row and isinstance(value.host, int) else None
        return Part(handle.key, value.start - begins, value.stop - begins, value.row, host)

    def _touch(self, rank: int, request: str) -> None:
        ranks = self._touched.setdefault(request, set())
        if rank not in ranks:
            ranks.add(rank)
            self.tell(rank, Open(request=EngineRequest(id=request), needs=[]))

    # --- answers ------------------------------------------------------------------------------------------------------
    def stashed(self) -> list[FromRank]:
        """What came while something else was waited for."""
        stash, self._stash = self._stash, []
        return stash

    def take(self, message: Landed | Refused | Fetched) -> Landing | Failed | None:
        """What *message* means for the worker: a step that is done, a request that has failed, or nothing."""
        if isinstance(message, Refused):
            return message.failed
        if isinstance(message, Fetched):
            return None  # of a fetch that was given up
        flying = self._flying.get(message.step)
        if flying is None:
            return None  # of a mesh that has lost a rank
        flying.waiting.discard(message.rank)
        self._landed(message.rank, flying)
        flying.failed[message.rank] = frozenset(i for i, made in enumerate(message.calls) if made.failed is not None)
        landing = None
        if message.rank == flying.seat.ranks[0] and _HERE not in flying.seat.ranks:  # else it lands here
            landing = self._landing(message, flying)
        self._compare(message.step, flying)
        return landing

    def _compare(self, step: int, flying: _Flying) -> None:
        """Let go of a step that has landed everywhere. All ranks of a mesh must have come to the same."""
        if flying.waiting or (_HERE in flying.seat.ranks and _HERE not in flying.failed):
            return
        del self._flying[step]
        self._doubts.pop(step, None)
        alike = len(set(flying.failed.values())) == 1
        if _HERE in flying.failed:
            if not alike:
                raise IntegrityError(
                    f"a step of node {flying.work[0].call.op.call.node!r} failed on some ranks of its mesh and not on "
                    f"others: { ({rank: sorted(calls) for rank, calls in flying.failed.items()}) }"
                )
        elif alike and len(flying.seat.ranks) > 1 and any(flying.failed.values()):
            for rank in flying.seat.ranks:  # one that hears nothing ends itself, and its mesh starts again
                self.tell(rank, Agreed(step=step))

    def next_doubt(self) -> float | None:
        """When (monotonic seconds) a mesh must have agreed on a step that failed."""
        return min(self._doubts.values(), default=None)

    def check_doubts(self, now: float) -> None:
        """Raise :class:`~mstar.resources.base.IntegrityError` if a mesh has not agreed in time."""
        if self._doubts and now > min(self._doubts.values()):
            raise IntegrityError(
                f"a step failed on rank 0 of a mesh, and the others have said nothing for {DOUBT_S:g} s"
            )

    def _landed(self, rank: int, flying: _Flying) -> None:
        link = self._links.get(rank)
        if link is not None:
            link.flying -= 1
            link.decoding -= flying.decodes

    def _landing(self, message: Landed, flying: _Flying) -> Landing:
        tensors = [unpack(contents, _CPU) for contents in message.bases]
        lates = [None if tensor.is_meta else Late(tensor) for tensor in tensors]
        bases = [tensor if tensor.is_meta else to_device(tensor, self._device) for tensor in tensors]
        aways = [self._away(contents.key, flying.seat.ranks) for contents in message.bases]
        results: list[RowResult | Failed] = []
        for w, made in zip(flying.work, message.calls, strict=True):
            if made.failed is not None:
                results.append(made.failed)
                continue
            outputs = {}
            for port, (number, start, stop, row) in made.outputs.items():
                ref = outputs[port] = Ref(bases[number], start, stop, row, late=lates[number])
                ref.away = aways[number]
                if bases[number].is_meta:
                    self._bound.setdefault(w.call.run.request.id, set()).update(flying.seat.ranks)
            results.append(RowResult(outputs if w.complete else None, made.logprobs))
        return Landing(flying.work, results, message.seconds)

    def _away(self, key: int, ranks: Sequence[int]) -> Away:
        away = Away(self._fetch)
        for rank in ranks:
            if rank in self._links:
                away.held[rank] = (Handle(key, self._links[rank].dropped), 0)
        return away

    def _fetch(self, rank: int, key: int) -> Tensor:
        """The contents of a value that only *rank* has. Waits for it: routes seldom look at such values."""
        link = self._links.get(rank)
        if link is None:
            raise RankLost(rank, "it had what a route wants to see")
        link.outbox.append(Fetch(key=key))
        link.flush()
        until = time.monotonic() + _FETCH_S
        while (left := until - time.monotonic()) > 0:
            for message in link.peer.receive(left):
                if isinstance(message, Fetched) and message.contents.key == key:
                    found = message.contents
                    return unpack(found, self._device)
                self._stash.append(message)
        raise RankLost(rank, f"it has not sent a value within {_FETCH_S:.0f} s")

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
        return [{"rank": rank, "flying": link.flying} for rank, link in sorted(self._links.items())]


def coordinate(built: Built, config: WorkerConfig, registry: Registry) -> Ranks | None:
    """What rank 0 of *built*'s layout needs beside a worker; ``None`` where it is the only one."""
    if built.layout.ranks == 1:
        return None
    deployment = config.deployment
    declared, _ = declared_resources(built.model, deployment)

    def shadows(capacities: Mapping[str, int]) -> dict[str, Resource]:
        return shadow_pools(declared, capacities, built.plan, deployment, registry, built.device, built.dtype)

    return Ranks(Routing(built.plan, built.layout), built.resources, shadows, built.device)
