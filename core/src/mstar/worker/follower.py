"""A rank other than 0: it runs the steps that rank 0 decides, on nodes and pools of its own.

It knows no walks, queues or clients. Its messages come in one order, and it does everything in that order: so pools of
several ranks that get the same messages hold the same books.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.device import raise_if_lost
from mstar.engine.engine import Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.graph.values import Ref
from mstar.registry import Registry
from mstar.resources.base import IntegrityError, Owner
from mstar.resources.base import Row as ResourceRow
from mstar.resources.staging import Late
from mstar.spec.request import EngineRequest, Event
from mstar.worker.build import build
from mstar.worker.equip import equip, warm_up
from mstar.worker.handles import held, pack, ref_of
from mstar.worker.lanes import lane_store
from mstar.worker.live import failure
from mstar.worker.messages import (
    Agreed,
    Close,
    Contents,
    Drop,
    Export,
    Exported,
    Fetch,
    Fetched,
    Found,
    FromRank,
    Import,
    Landed,
    Learn,
    Made,
    Match,
    Meet,
    Met,
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
    UseLanes,
)
from mstar.worker.moves import Leaving, adopt
from mstar.worker.portions import Portions
from mstar.worker.profile import device_memory
from mstar.worker.prompt_heads import skip_known
from mstar.worker.routing import DOUBT_S, Routing
from mstar.worker.tensor_channel import TensorChannel, arrived, way_between

__all__ = ["Follower"]

log = logging.getLogger(__name__)

_AHEAD = 2
"""Steps that may run before the first is waited for: on a GPU the next is launched meanwhile."""


class _Request:
    """What a rank keeps of a request between its steps: what a call looks for in its run."""

    def __init__(self, request: EngineRequest):
        self.request = request
        self.rows: dict[CallOp, Any] = {}
        self.partly: dict[int, CallRun] = {}  # calls that are cut, by the number of their operation


class _Partition:
    """Stands where a call looks for its partition: streams are rank 0's."""

    heard: Mapping[str, int] = {}


class _RankCall(CallRun):
    """A call as its rank sees it. *session*: the key of the state that sessions keep."""

    __slots__ = ("session",)

    def __init__(self, run: Any, op: CallOp, row: Row, inputs: dict[str, Any]):
        partition: Any = _Partition
        super().__init__(run, partition, op, inputs, row.length)
        self.session = row.session


class _Base:
    """A value that is held for rank 0, and what the host knows of it."""

    __slots__ = ("host", "tensor")

    def __init__(self, tensor: Tensor, host: Any = None):
        self.tensor, self.host = tensor, host


class Follower:
    """One rank's share of a model. Driven as a worker is (:class:`mstar.cluster.worker_loop.Steppable`).

    :ivar answer: takes what goes to rank 0; set by whoever carries the messages.
    """

    def __init__(self, config: WorkerConfig, registry: Registry, on_phase: Callable[[Phase], None] = lambda _: None):
        built = build(config, registry, on_phase)
        self.config, self.rank = config, config.rank
        self.plan, self.resources, self._device = built.plan, built.resources, built.device
        self.routing = Routing(built.plan, built.layout)
        self._kept = frozenset(built.plan.graph.sessions)
        self._step_tokens = config.deployment.scheduler.step_tokens(built.device.type)
        self.engine = equip(built, config, registry, self._owner)
        warm_up(self.engine, built, config, on_phase)
        self.channel = TensorChannel(1, built.device)
        self._store: Any = None  # where rank 0 is met for it
        self._local = True
        self.answer: Callable[[list[FromRank]], None] = lambda answers: None
        self._inbox: deque[ToRank] = deque()
        self._requests: dict[str, _Request] = {}
        self._bases: dict[int, _Base] = {}
        self._flights: deque[tuple[Run, list[Work], list[Flight], float]] = deque()
        self._portions = Portions(self.resources, self._owner_of)
        self._leaving: deque[tuple[int, Leaving]] = deque()  # state that goes to other ranks, by the numbers of moves
        self._doubts: dict[int, float] = {}  # steps of a mesh that failed here → when rank 0 must have said the same

    def facts(self, place: str | None = None) -> dict[str, Any]:
        """What rank 0 must know of this one. *place*: a folder that both see, or ``tcp://HOST`` of this one, where they
        may meet to exchange tensors."""
        kind = self._device.type
        if place is not None and way_between(self.config.deployment.engine.values, kind, kind)[0] != "shm":
            self._store, place = lane_store(place, first=True)
            self._local = not place.startswith("tcp://")
        return {
            "capacities": {name: resource.capacity() for name, resource in self.resources.items()},
            "device": kind,
            "place": place,
        }

    # --- driven -------------------------------------------------------------------------------------------------------
    def take(self, message: ToRank) -> None:
        self._inbox.append(self.channel.resolve(message))

    def step(self) -> bool:
        """Do what the first message says, or wait for the earliest step. ``False`` when there is nothing to do yet."""
        if self._doubts and not self._inbox and time.monotonic() > min(self._doubts.values()):
            raise IntegrityError(f"a step failed on rank {self.rank}, and not on the others of its mesh")
        self._look()
        if self._leaving and self._leaving[0][1].there() and self.channel.has_room:
            move, leaving = self._leaving.popleft()
            self._send([Exported(rank=self.rank, move=move, held=leaving.held())])
            return True
        runs = bool(self._inbox) and arrived(self._inbox[0], on_host=False)
        if runs and len(self._flights) < _AHEAD:
            self._do(self._inbox.popleft())
            return True
        if self._flights and self.channel.has_room and (runs or self._due()):
            self._land()
            return True
        return False

    def _look(self) -> None:
        """See what has passed by the channel."""
        if self.channel.opening and (fault := self.channel.opened()) is not None:
            self._send([Met(rank=self.rank, fault=fault)])
        self.channel.step()
        if self.channel.fault is not None:
            raise IntegrityError(f"rank {self.rank} cannot exchange tensors with rank 0: {self.channel.fault}")

    def _send(self, answers: list[FromRank]) -> None:
        self.answer(self.channel.launch(answers))

    def _due(self) -> bool:
        """Whether to wait for the earliest step. Where nobody wants its outputs, the next one comes before it has been
        computed, and is to be launched by then."""
        message, _, flights, _ = self._flights[0]
        return message.answers or all(map(self.engine.arrived, flights))

    def _do(self, message: ToRank) -> None:
        match message:
            case Run():
                self._run(message)
            case Open():
                self._open(message)
            case Meet():
                self.channel.begin(message.backend, lambda: self._store, self._local)
            case UseLanes():
                self.channel.use() if message.open else self.channel.close()
            case Agreed():
                self._doubts.pop(message.step, None)
            case Close():
                self._close(message)
            case Export():
                self._export(message)
            case Seek():
                self._seek(message)
            case Import():
                self._import(message)
            case Drop():
                for key in message.keys:
                    self._bases.pop(key, None)  # a step that failed has made nothing
            case Fetch():
                while self._flights:
                    self._land()
                self._send([Fetched(rank=self.rank, contents=pack(message.key, self._bases[message.key].tensor))])
            case Rewind():
                row = ResourceRow(Owner(*message.owner), message.tokens, message.complete)
                self.resources[message.resource].retract(row)
            case Learn():
                self.resources[message.resource].learn(Owner(*message.owner), message.ids)
            case Match():
                sibling = None if message.sibling is None else Owner(*message.sibling)
                self.resources[message.resource].match(Owner(*message.owner), message.ids, sibling)
            case Missed():
                self.resources[message.resource].missed(Owner(*message.owner), message.tokens)
            case Skip():
                sibling = None if message.sibling is None else Owner(*message.sibling)
                self.resources[message.resource].skip(Owner(*message.owner), message.ids, sibling)

    # --- requests -----------------------------------------------------------------------------------------------------
    def _open(self, message: Open) -> None:
        request = message.request
        self._requests.setdefault(request.id, _Request(request))
        try:
            for name, key, context, units in message.needs:
                owner = Owner(key, context)
                self._reserve(name, owner, units)
                self.resources[name].open(owner, request)
            for name, key, context, units in message.later:
                self._reserve(name, Owner(key, context), units)
        except IntegrityError:
            raise  # the books of two ranks differ: nothing here can be trusted
        except Exception as error:
            self._refuse(request.id, error, "begun")

    def _reserve(self, name: str, owner: Owner, units: int) -> None:
        if not self.resources[name].reserve(owner, units):
            raise IntegrityError(f"rank {self.rank} has no {units} units of {name!r} left, which rank 0 promised")

    def _export(self, message: Export) -> None:
        try:
            owners = [(name, Owner(key, context)) for name, key, context in message.owners]
            self._leaving.append((message.move, Leaving(self.resources, owners, self.channel)))
        except Exception as error:
            self._refuse(message.request, error, "handed over")

    def _import(self, message: Import) -> None:
        try:
            adopt(self.resources, self._requests[message.request].request, message.held, self._device)
        except Exception as error:
            self._refuse(message.request, error, "taken over")

    def _seek(self, message: Seek) -> None:
        op = self.routing.ops[message.op]
        context, shares = op.call.context, []
        for name in op.entry.resources:
            key = message.session if message.session is not None and name in self._kept else message.request
            sibling = None if message.sibling is None else Owner(message.sibling, context)
            shares.append((self.resources[name], Owner(key, context), sibling))
        found = skip_known(shares, message.ids)
        seat = self.routing.layout.seat_of(op.call.node, self.rank)
        if seat is not None and seat.ranks[0] == self.rank:
            left = len(message.ids) - found.tokens
            cuts = sorted({found.tokens + cut for pool, owner, _ in shares for cut in pool.cuts(owner, left)})
            self._send([Found(number=message.number, asked=found.asked, tokens=found.tokens, cuts=cuts)])

    def _refuse(self, request: str, error: Exception, done: str) -> None:
        raise_if_lost(error)
        log.exception("the state of request %r could not be %s", request, done)
        self._send([Refused(rank=self.rank, failed=failure(request, error))])

    def _close(self, message: Close) -> None:
        self._requests.pop(message.request, None)
        for name, key, context in message.owners:
            self.resources[name].close(Owner(key, context))

    def _owner(self, work: Work, resource: str) -> Owner:
        return self._owner_of(work.call, resource)

    def _owner_of(self, call: Any, resource: str) -> Owner:
        key = call.session if call.session is not None and resource in self._kept else call.run.request.id
        return Owner(key, call.op.call.context)

    # --- steps --------------------------------------------------------------------------------------------------------
    def _run(self, message: Run) -> None:
        began = time.perf_counter()
        for contents in message.values:
            self._bases[contents.key] = _Base(*held(contents, self._device))
        work = [self._work(row) for row in message.rows]
        if self._cuts(message.rows[0].op):
            flights = self._launch_in_portions([w.call for w in work])
        else:
            flights, first = self.engine.launch(work), 0
            for flight in flights:
                if flight.failure is None:
                    self._keep(message.step, first, flight)
                first += len(flight.work)
                _go_on(flight)
        if message.answers:
            self._fetch(message, flights)
        for w, row in zip(work, message.rows, strict=True):
            if not w.complete:
                self._requests[row.request].partly[row.op] = w.call
        self._flights.append((message, work, flights, began))

    def _cuts(self, op: int) -> bool:
        """Whether the *op*-th call is cut into steps by a pool of this rank, which rank 0 cannot ask."""
        call = self.routing.ops[op]
        seat = self.routing.layout.seat_of(call.call.node, self.rank)
        return seat is not None and 0 not in seat.ranks and self._portions.concern(call)

    def _launch_in_portions(self, calls: list[CallRun]) -> list[Flight]:
        """Steps of what is not known of *calls*, of which none has outputs."""
        flights: list[Flight] = []
        while calls:
            work: list[Work] = []
            tokens = self._step_tokens
            for call in calls:
                if tokens > 0 and not self._portions.skip(call):
                    share = self._portions.work(call, tokens, first=not work)
                    if share is not None:
                        work.append(share)
                        tokens -= -(-share.tokens // call.op.entry.step_items)
            if not work:
                break
            launched = self.engine.launch(work)
            flights += launched
            failed = {id(w.call) for flight in launched if not _go_on(flight) for w in flight.work}
            calls = [call for call in calls if call.remaining > 0 and id(call) not in failed]
        return flights

    def _work(self, row: Row) -> Work:
        run = self._requests[row.request]
        call = run.partly.pop(row.op, None) if row.start else None
        if call is None:
            inputs = {port: self._input(value) for port, value in row.inputs.items()}
            call = _RankCall(run, self.routing.ops[row.op], row, inputs)
            call.done = row.start
        return Work(call, row.start, row.tokens, row.complete)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Part):
            return value
        base = self._bases[value.key]
        return ref_of(value, base.tensor, base.host)

    def _keep(self, step: int, first: int, flight: Flight) -> None:
        """Name the step's outputs as rank 0 does."""
        for key, ref in self.routing.bases(step, first, flight):
            self._bases[key] = _Base(ref.base)

    def _fetch(self, message: Run, flights: list[Flight]) -> None:
        """Have what rank 0 wants of the step come to the host behind it, and not behind the step after it."""
        leaving = self.routing.leaving_of(row.op for row in message.rows)
        wanted = self.routing.wanted_of(row.op for row in message.rows)
        on_the_way: dict[int, Late] = {}
        results = [r for flight in flights if flight.outcome is not None for r in flight.outcome.results]
        with torch.inference_mode():
            for port, ref in chain.from_iterable((result.outputs or {}).items() for result in results):
                if port in leaving and ref.late is None and (port in wanted or not self.channel.takes(ref.base)):
                    if id(ref.base) not in on_the_way:
                        on_the_way[id(ref.base)] = Late(ref.base)
                    ref.late = on_the_way[id(ref.base)]

    def _land(self) -> None:
        message, work, flights, began = self._flights.popleft()
        results = self._landed([w.call for w in work], flights)
        failed = any(isinstance(result, Exception) for result in results)
        if failed and self.routing.meshed(message.rows[0].op):
            self._doubts[message.step] = time.monotonic() + DOUBT_S
        bases: list[Contents] = []
        calls: list[Made] = []
        if message.answers:
            leaving = self.routing.leaving_of(row.op for row in message.rows)
            wanted = self.routing.wanted_of(row.op for row in message.rows)
            numbers: dict[int, int] = {}
            for index, (row, result) in enumerate(zip(message.rows, results, strict=True)):
                if isinstance(result, Exception):
                    calls.append(Made(failed=failure(row.request, result)))
                else:
                    outputs = self._outputs(message, index, result, numbers, bases, leaving, wanted)
                    calls.append(Made(outputs, result.logprobs))
        elif failed:
            calls = [
                Made(failed=failure(row.request, result)) if isinstance(result, Exception) else Made()
                for row, result in zip(message.rows, results, strict=True)
            ]
        seconds = time.perf_counter() - began
        self._send([Landed(rank=self.rank, step=message.step, seconds=seconds, bases=bases, calls=calls)])

    def _landed(self, calls: Sequence[CallRun], flights: Sequence[Flight]) -> list[RowResult | Exception]:
        """What came of each of *calls*: nothing, where all of it was known."""
        found: dict[int, RowResult | Exception] = {id(call): RowResult({}) for call in calls}
        for flight in flights:
            for w, result in zip(flight.work, self.engine.land(flight), strict=True):
                if not isinstance(found[id(w.call)], Exception):
                    found[id(w.call)] = result
        return [found[id(call)] for call in calls]

    def _outputs(
        self,
        message: Run,
        index: int,
        result: RowResult,
        numbers: dict[int, int],
        bases: list[Contents],
        leaving: frozenset[str],
        wanted: frozenset[str],
    ) -> dict[str, tuple[int, int, int, bool]]:
        """Where the outputs of the step's *index*-th call lie in *bases*, which grow by those that are new."""
        outputs = {}
        for port, ref in (result.outputs or {}).items():
            number = numbers.get(id(ref.base))
            if number is None:
                number = numbers[id(ref.base)] = len(bases)
                key = self.routing.key(message.step, index, message.rows[index].op, port)
                bases.append(self._contents(key, ref, port in leaving, port in wanted))
            outputs[port] = (number, ref.start, ref.stop, ref.row)
        return outputs

    def _contents(self, key: int, ref: Ref, leaving: bool, wanted: bool) -> Contents:
        """*wanted*: on the host of rank 0."""
        if not leaving:
            return pack(key, ref.base, contents=False)
        if not wanted and self.channel.takes(ref.base):
            return self.channel.pack(key, ref.base)
        return pack(key, ref.base if ref.late is None else ref.late.tensor())

    # --- what a worker has besides ------------------------------------------------------------------------------------
    def submit(self, request: EngineRequest) -> None:
        raise IntegrityError(f"request {request.id!r} came to rank {self.rank}; rank 0 takes requests")

    push = cancel = submit

    def ack(self, request: str, stream: str, items: int) -> None:
        raise IntegrityError("rank 0 takes acknowledgements")

    def next_deadline(self) -> float | None:
        if self._flights or self._leaving or self.channel.busy:
            return time.monotonic()  # it is looked at again soon, or at once when the next step comes
        return min(self._doubts.values(), default=None)

    def events(self) -> list[Event]:
        return []

    def status(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "steps": self.engine.steps,
            "engine": self.engine.runner.status(),
            "resources": {name: resource.usage()._asdict() for name, resource in self.resources.items()},
            "requests": len(self._requests),
            "values": len(self._bases),
            "on_the_way": self.channel.on_the_way,
            "memory": dict(device_memory(self._device)),
        }

    def close(self) -> None:
        self.channel.close()
        self._store = None
        self._inbox.clear()
        self._flights.clear()
        self._leaving.clear()
        self._bases.clear()
        self._requests.clear()


def _go_on(flight: Flight) -> bool:
    """The calls of *flight* are so much further; ``False`` if it could not be launched."""
    if flight.failure is not None:
        return False
    for w in flight.work:
        w.call.done += w.tokens
        w.call.chunks += 1
    return True
