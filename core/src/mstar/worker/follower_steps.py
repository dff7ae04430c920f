"""Steps that a rank other than 0 runs: as rank 0's messages say, on values that it sends or that lie here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mstar.engine.engine import Engine, Flight
from mstar.engine.step import RowResult, Work
from mstar.graph.calls import CallRun
from mstar.graph.program import CallOp
from mstar.graph.values import Ref
from mstar.resources.staging import Late
from mstar.spec.request import EngineRequest
from mstar.worker.handles import held, pack, ref_of
from mstar.worker.live import failure
from mstar.worker.messages import Contents, FromRank, Landed, Made, Part, Row, Run
from mstar.worker.portions import Portions
from mstar.worker.routing import DOUBT_S, Routing
from mstar.worker.tensor_channel import TensorChannel

__all__ = ["AHEAD", "FollowerSteps", "RankRequest"]

AHEAD = 2
"""Steps that may run before the first is waited for: on a GPU the next is launched meanwhile."""

_LONG_S = 1.0


class RankRequest:
    """What a rank keeps of a request between its steps: what a call looks for in its run."""

    def __init__(self, request: EngineRequest):
        self.request = request
        self.rows: dict[CallOp, Any] = {}
        self.mark: Any = None  # behind the last step that it had a part in
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


class _Value:
    """A value that is held for rank 0, and what the host knows of it."""

    __slots__ = ("host", "tensor")

    def __init__(self, tensor: Tensor, host: Any = None):
        self.tensor, self.host = tensor, host


@dataclass(slots=True)
class _Flying:
    """A step that was launched. *began*: seconds. *mark*: behind all of it on the device."""

    message: Run
    work: list[Work]
    flights: list[Flight]
    began: float
    mark: Any


class FollowerSteps:
    """The steps of one rank.

    :param requests: those that the rank knows of. :param portions: which calls its pools cut. :param step_tokens: most
        tokens of a step. :param send: takes what goes to rank 0. :param mark: gives a mark behind what was launched.
    :ivar values: what lies here for rank 0, by its keys. :ivar doubts: steps of a mesh that failed here → when rank 0
        must have said the same.
    """

    def __init__(
        self,
        rank: int,
        routing: Routing,
        engine: Engine,
        requests: Mapping[str, RankRequest],
        portions: Portions,
        channel: TensorChannel,
        device: torch.device,
        step_tokens: int,
        send: Callable[[list[FromRank]], None],
        mark: Callable[[], Any] = lambda: None,
    ):
        self._rank, self._routing, self._engine, self._requests = rank, routing, engine, requests
        self._portions, self._channel, self._device = portions, channel, device
        self._step_tokens, self._send, self._mark = step_tokens, send, mark
        self.values: dict[int, _Value] = {}
        self.doubts: dict[int, float] = {}
        self.flights: deque[_Flying] = deque()

    def clear(self) -> None:
        """Forget all."""
        self.flights.clear()
        self.values.clear()

    def arrived(self) -> bool:
        """Whether the earliest step has been computed, so that :meth:`land` does not wait. One that takes very long is
        waited for nevertheless: whoever watches this process is to see how long."""
        first = self.flights[0]
        if time.perf_counter() - first.began > _LONG_S:
            return True
        if first.message.answers and first.mark is not None:
            return bool(first.mark.query())
        return all(map(self._engine.arrived, first.flights))

    def awaited(self) -> bool:
        """Whether rank 0 waits for the earliest step. Where nobody wants its outputs, the next one comes before it has
        been computed, and is to be launched by then."""
        return self.flights[0].message.answers

    def run(self, message: Run) -> None:
        """Launch a step."""
        began = time.perf_counter()
        for contents in message.values:
            self.values[contents.key] = _Value(*held(contents, self._device))
        work = [self._work(row) for row in message.rows]
        if self._cuts(message.rows[0].op):
            flights = self._launch_in_portions([w.call for w in work])
        else:
            flights, first = self._engine.launch(work), 0
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
        mark = self._mark()
        for row in message.rows:
            self._requests[row.request].mark = mark
        self.flights.append(_Flying(message, work, flights, began, mark))

    def _cuts(self, op: int) -> bool:
        """Whether the *op*-th call is cut into steps by a pool of this rank, which rank 0 cannot ask."""
        call = self._routing.ops[op]
        seat = self._routing.layout.seat_of(call.call.node, self._rank)
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
            launched = self._engine.launch(work)
            flights += launched
            failed = {id(w.call) for flight in launched if not _go_on(flight) for w in flight.work}
            calls = [call for call in calls if call.remaining > 0 and id(call) not in failed]
        return flights

    def _work(self, row: Row) -> Work:
        run = self._requests[row.request]
        call = run.partly.pop(row.op, None) if row.start else None
        if call is None:
            inputs = {port: self._input(value) for port, value in row.inputs.items()}
            call = _RankCall(run, self._routing.ops[row.op], row, inputs)
            call.done = row.start
        return Work(call, row.start, row.tokens, row.complete)

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Part):
            return value
        base = self.values[value.key]
        return ref_of(value, base.tensor, base.host)

    def _keep(self, step: int, first: int, flight: Flight) -> None:
        """Name the step's outputs as rank 0 does."""
        for key, ref in self._routing.bases(step, first, flight):
            self.values[key] = _Value(ref.base)

    def _fetch(self, message: Run, flights: list[Flight]) -> None:
        """Have what rank 0 wants of the step come to the host behind it, and not behind the step after it."""
        leaving = self._routing.leaving_of(row.op for row in message.rows)
        wanted = self._routing.wanted_of(row.op for row in message.rows)
        on_the_way: dict[int, Late] = {}
        results = [r for flight in flights if flight.outcome is not None for r in flight.outcome.results]
        with torch.inference_mode():
            for port, ref in chain.from_iterable((result.outputs or {}).items() for result in results):
                if port in leaving and ref.late is None and (port in wanted or not self._channel.takes(ref.base)):
                    if id(ref.base) not in on_the_way:
                        on_the_way[id(ref.base)] = Late(ref.base)
                    ref.late = on_the_way[id(ref.base)]

    def land(self) -> None:
        """Wait for the earliest step and answer."""
        flying = self.flights.popleft()
        message, work, flights, began = flying.message, flying.work, flying.flights, flying.began
        results = self._landed([w.call for w in work], flights)
        failed = any(isinstance(result, Exception) for result in results)
        if failed and self._routing.meshed(message.rows[0].op):
            self.doubts[message.step] = time.monotonic() + DOUBT_S
        bases: list[Contents] = []
        calls: list[Made] = []
        if message.answers:
            leaving = self._routing.leaving_of(row.op for row in message.rows)
            wanted = self._routing.wanted_of(row.op for row in message.rows)
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
        self._send([Landed(rank=self._rank, step=message.step, seconds=seconds, bases=bases, calls=calls)])

    def _landed(self, calls: Sequence[CallRun], flights: Sequence[Flight]) -> list[RowResult | Exception]:
        """What came of each of *calls*: nothing, where all of it was known."""
        found: dict[int, RowResult | Exception] = {id(call): RowResult({}) for call in calls}
        for flight in flights:
            for w, result in zip(flight.work, self._engine.land(flight), strict=True):
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
                key = self._routing.key(message.step, index, message.rows[index].op, port)
                bases.append(self._contents(key, ref, port in leaving, port in wanted))
            outputs[port] = (number, ref.start, ref.stop, ref.row)
        return outputs

    def _contents(self, key: int, ref: Ref, leaving: bool, wanted: bool) -> Contents:
        """*wanted*: on the host of rank 0."""
        if not leaving:
            return pack(key, ref.base, contents=False)
        if not wanted and self._channel.takes(ref.base):
            return self._channel.pack(key, ref.base)
        return pack(key, ref.base if ref.late is None else ref.late.tensor())


def _go_on(flight: Flight) -> bool:
    """The calls of *flight* are so much further; ``False`` if it could not be launched."""
    if flight.failure is not None:
        return False
    for w in flight.work:
        w.call.done += w.tokens
        w.call.chunks += 1
    return True
