"""Steps that other ranks run, alone or in a mesh with rank 0: told to them, and what came of them.

A step whose node lies elsewhere is sent there and lands when the rank answers. One of a mesh that rank 0 belongs to is
told to the others and then run here as any step: all run it in lockstep.

Each rank has at most one step that decodes on its way, so that those that are ready meanwhile join the next, and at
most two others, so that it need not wait for rank 0: that is the back-pressure.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mstar.engine.engine import Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.graph.values import Ref
from mstar.resources.base import IntegrityError, Owner, Resource
from mstar.resources.staging import Late, to_device
from mstar.spec.placement import Seat
from mstar.spec.request import EngineRequest, Failed
from mstar.worker.handles import Arriving, unpack
from mstar.worker.messages import Agreed, Contents, Landed, Row, Run, ToRank
from mstar.worker.rank_links import Away, Link
from mstar.worker.rank_values import RankValues
from mstar.worker.routing import DOUBT_S, Routing
from mstar.worker.seats import Seats
from mstar.worker.tensor_channel import arrived

__all__ = ["Landing", "RankSteps"]

_HERE = 0
_CPU = torch.device("cpu")


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


class _Ranks(Protocol):
    """What steps need of :class:`mstar.worker.ranks.Ranks`."""

    seats: Seats
    books: dict[str, Resource]

    def tell(self, rank: int, message: ToRank) -> None: ...
    def touch(self, rank: int, request: str) -> None: ...
    def bind(self, request: str, ranks: Iterable[int]) -> None: ...
    def session_key(self, request: EngineRequest) -> str | None: ...
    def owner_of(self, call: CallRun, resource: str) -> Owner: ...
    def rewind(self, resource: str, owner: Owner, tokens: int, complete: bool = True) -> bool: ...


class RankSteps:
    """:param links: the ranks that live. :param device: that of rank 0."""

    def __init__(
        self, ranks: _Ranks, routing: Routing, links: Mapping[int, Link], values: RankValues, device: torch.device
    ):
        self._ranks, self._routing, self._links, self._values = ranks, routing, links, values
        self._device = device
        self._seats = ranks.seats
        self._numbers = itertools.count(1)
        self.flying: dict[int, _Flying] = {}
        self._arriving: list[tuple[Landed, _Flying]] = []  # steps whose outputs are on their way
        self._mirrored: int | None = None
        self._doubts: dict[int, float] = {}  # steps of a mesh that failed here → when the others must have, too

    def lost(self, rank: int) -> set[str]:
        """*rank* has died: the requests of the steps that it had a part in."""
        gone: set[str] = set()
        for step in [step for step, flying in self.flying.items() if rank in flying.seat.ranks]:
            flying = self.flying.pop(step)
            gone.update(w.call.run.request.id for w in flying.work)
            for other in flying.waiting:
                self._landed(other, flying)
        for landed, flying in self._arriving:
            if landed.rank == rank:
                gone.update(w.call.run.request.id for w in flying.work)
        self._arriving = [pair for pair in self._arriving if pair[0].rank != rank]
        return gone

    def group(self, call: CallRun) -> tuple[Any, ...]:
        """Calls of one group may share a step: they run on the same seat."""
        return (*call.group, self._seats.of_call(call))

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
        seat = self._seats.of_call(work[0].call)
        others = [rank for rank in seat.ranks if rank != _HERE]
        if not others:
            return
        step, here = next(self._numbers), _HERE in seat.ranks
        decodes = any(w.call.decode for w in work)
        if not here:
            self._follow(work)
        self.flying[step] = _Flying(work, seat, set(others), decodes)
        for rank in others:
            link = self._links[rank]
            for w in work:
                self._ranks.touch(rank, w.call.run.request.id)
            values: list[Contents] = []
            rows = [self._row(w, rank, values) for w in work]
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
                    self._ranks.books[name].follow(self._ranks.owner_of(w.call, name), w.tokens)

    def launched(self, flights: Sequence[Flight]) -> None:
        """This rank has launched the step that was dispatched last: the others name its outputs alike."""
        step, self._mirrored = self._mirrored, None
        if step is None:
            return
        seat, first = self.flying[step].seat, 0
        for flight in flights:
            found: dict[int, Away] = {}
            for key, ref in self._routing.bases(step, first, flight):
                found[id(ref.base)] = self._values.away(key, [rank for rank in seat.ranks if rank != _HERE])
            for result in flight.outcome.results if flight.outcome is not None else ():
                for ref in (result.outputs or {}).values():
                    ref.away = found[id(ref.base)]
            flight.step = step
            flight.first = first
            first += len(flight.work)

    def landed_here(self, flight: Flight, results: Sequence[RowResult | Exception]) -> None:
        """*flight*, which a mesh runs, has landed on this rank."""
        flying = self.flying.get(flight.step)
        if flying is None:
            return
        failed = {flight.first + i for i, result in enumerate(results) if isinstance(result, Exception)}
        flying.failed[_HERE] = flying.failed.get(_HERE, frozenset()) | failed
        if failed and flight.step not in self._doubts:
            self._doubts[flight.step] = time.monotonic() + DOUBT_S
            for rank in flying.seat.ranks:
                if rank != _HERE:
                    self._ranks.tell(rank, Agreed(step=flight.step))
        if flight.first + len(flight.work) == len(flying.work):
            self._compare(flight.step, flying)

    def retracted(self, flight: Flight, index: int) -> None:
        """This rank has retracted the *index*-th call of *flight*; those that ran it with this one do so, too."""
        if not flight.step:
            return
        frozen = flight.work[index].call.op.entry.frozen
        for resource, rows in zip(flight.used, flight.rows, strict=True):
            if resource.name not in frozen:
                row = rows[index]
                self._ranks.rewind(resource.name, row.owner, row.length, row.complete)

    def _row(self, w: Work, rank: int, values: list[Contents]) -> Row:
        call = w.call
        request = call.run.request
        session = self._ranks.session_key(request)
        inputs = {}
        if not call.chunks:  # the rank keeps those of a call that is cut
            inputs = {port: self._values.given(value, rank, values) for port, value in call.inputs.items()}
        return Row(
            request.id, self._routing.number_of[call.op], session, call.length, w.start, w.tokens, w.complete, inputs
        )

    def take(self, message: Landed) -> Landing | None:
        """What *message* means for the worker: a step that is done, or nothing yet."""
        flying = self.flying.get(message.step)
        if flying is None:
            return None  # of a mesh that has lost a rank
        flying.waiting.discard(message.rank)
        self._landed(message.rank, flying)
        flying.failed[message.rank] = frozenset(i for i, made in enumerate(message.calls) if made.failed is not None)
        landing = None
        if message.rank == flying.seat.ranks[0] and _HERE not in flying.seat.ranks:  # else it lands here
            if arrived(message):
                landing = self._landing(message, flying)
            else:
                self._arriving.append((message, flying))
        self._compare(message.step, flying)
        return landing

    def arrived(self) -> list[Landing]:
        """Steps that are done and whose outputs have come since they landed."""
        there, self._arriving = _parted(self._arriving)
        return [self._landing(message, flying) for message, flying in there]

    def _compare(self, step: int, flying: _Flying) -> None:
        """Let go of a step that has landed everywhere. All ranks of a mesh must have come to the same."""
        if flying.waiting or (_HERE in flying.seat.ranks and _HERE not in flying.failed):
            return
        del self.flying[step]
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
                self._ranks.tell(rank, Agreed(step=step))

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

    def _at(self, contents: Contents) -> torch.device:
        """Where *contents* come to: what lay in a message may be wanted on the host."""
        return self._device if isinstance(contents.data, Arriving) else _CPU

    def _landing(self, message: Landed, flying: _Flying) -> Landing:
        tensors = [unpack(found, self._at(found)) for found in message.bases]
        lates = [None if tensor.is_meta or tensor.is_cuda else Late(tensor) for tensor in tensors]
        bases = [tensor if tensor.is_meta or tensor.is_cuda else to_device(tensor, self._device) for tensor in tensors]
        aways = [self._values.away(contents.key, flying.seat.ranks) for contents in message.bases]
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
                    self._ranks.bind(w.call.run.request.id, flying.seat.ranks)
            results.append(RowResult(outputs if w.complete else None, made.logprobs))
        return Landing(flying.work, results, message.seconds)


def _parted(steps: list[tuple[Landed, _Flying]]) -> tuple[list[tuple[Landed, _Flying]], list[tuple[Landed, _Flying]]]:
    """Those whose outputs are there, and the others."""
    sides: tuple[list[tuple[Landed, _Flying]], list[tuple[Landed, _Flying]]] = ([], [])
    for pair in steps:
        sides[not arrived(pair[0])].append(pair)
    return sides
