"""What all ranks know of a layout from the plan alone: operations by number, and which outputs leave their rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mstar.engine.engine import Flight
from mstar.graph.program import CallOp, Plan
from mstar.graph.values import Ref
from mstar.spec.placement import Layout, Seat
from mstar.worker.handles import output_key

__all__ = ["DOUBT_S", "Routing"]

DOUBT_S = 5.0
"""How long a rank that failed in a mesh's step waits to hear that the others did so, too."""


class Routing:
    """The same in every process of a layout.

    :ivar ops: all calls of all walks, in one order. :ivar leaving: call → its output ports whose contents rank 0 wants:
        for its loops and the client, for a stream, for another rank, or because no call reads them (a route may).
    """

    def __init__(self, plan: Plan, layout: Layout):
        self.plan, self.layout = plan, layout
        self.ops = [op for walk in sorted(plan.programs) for op in plan.programs[walk] if isinstance(op, CallOp)]
        self.number_of = {op: number for number, op in enumerate(self.ops)}
        self._port_of = {op: {port.name: number for number, port in enumerate(op.entry.outputs)} for op in self.ops}
        readers: dict[str, set[tuple[Seat, ...]]] = {}
        for op in self.ops:
            for _, value in op.reads:
                readers.setdefault(value, set()).add(layout.seats[op.call.node])
        self.leaving = {op: frozenset(self._leaving(op, readers)) for op in self.ops}

    def _leaving(self, op: CallOp, readers: dict[str, set[tuple[Seat, ...]]]) -> Iterator[str]:
        yield from op.host
        yield from op.call.emit
        spread = op.call.node in self.layout.by_context or op.call.node in self.layout.by_walk
        here = set() if spread else {self.layout.seats[op.call.node]}
        for port, value in op.call.outputs.items():
            if readers.get(value) != here:
                yield port

    def leaving_of(self, ops: Iterable[int]) -> frozenset[str]:
        """Output ports whose contents rank 0 wants of a step with these calls."""
        return frozenset().union(*(self.leaving[self.ops[op]] for op in {*ops}))

    def wanted_of(self, ops: Iterable[int]) -> frozenset[str]:
        """Of these, the ports whose contents rank 0 wants in its host's memory: for its loops, or for the client."""
        return frozenset(port for op in {*ops} for port in (*self.ops[op].host, *self.ops[op].call.emit))

    def key(self, step: int, call: int, op: int, port: str) -> int:
        """The key of the tensor that output *port* of the step's *call*-th call is the first to lie in."""
        return output_key(step, call, self._port_of[self.ops[op]][port])

    def meshed(self, op: int) -> bool:
        """Whether several ranks run the *op*-th call together."""
        return any(len(seat.ranks) > 1 for seat in self.layout.seats[self.ops[op].call.node])

    def bases(self, step: int, first: int, flight: Flight) -> Iterator[tuple[int, Ref]]:
        """Key and one reference of each tensor that *flight*'s outputs lie in. *first*: how many calls of the step come
        before the flight's."""
        if flight.outcome is None:
            return
        seen: set[int] = set()
        ports = self._port_of[flight.work[0].call.op]
        for index, result in enumerate(flight.outcome.results):
            for port, ref in (result.outputs or {}).items():
                if id(ref.base) not in seen:
                    seen.add(id(ref.base))
                    yield output_key(step, first + index, ports[port]), ref
