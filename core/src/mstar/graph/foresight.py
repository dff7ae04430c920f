"""Look-ahead in a request's walk: which call will follow one that still runs, and whether it did.

:meth:`Foresight.foresee` makes the call that follows unless a loop ends, or behind one whose number of iterations is
known and reached; it may be launched at once. When the result is
there and the walk goes on, :meth:`Foresight.adopt` takes the foreseen call where the walk comes to it with the inputs
that were foreseen; otherwise :meth:`Foresight.give_up` says which call must leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mstar.graph.again import DEFAULTS
from mstar.graph.calls import CallRun, Partition
from mstar.graph.program import CallOp, LoopEndOp, LoopOp
from mstar.graph.values import Ref
from mstar.spec.graph import Stop, Times, TokenStop

if TYPE_CHECKING:
    from mstar.graph.run import RequestRun

__all__ = ["Foresight"]


class Foresight:
    """The look-ahead of one request. A partition has at most one call that is foreseen: ``Partition.ahead``."""

    def __init__(self, run: RequestRun):
        self._run = run

    def foresee(self, call: CallRun, outputs: Mapping[str, Ref], may: Callable[[CallOp], bool]) -> CallRun | None:
        """The call that follows *call*, whose *outputs* the host does not know yet, unless they end a loop.

        ``None`` if that cannot be told: a stop that is no token's, a stream to wait for, the end of a walk.

        :param may: whether an operation may be launched before it is certain.
        """
        partition = call.partition
        if partition.joins or partition.ahead is not None:
            return None
        loop = call.op.loops[-1] if call.op.again is not None else None
        if loop in partition.loops and not self._is_over(loop, partition.loops[loop] + 1):
            return self._run.again(call.op).foresee(call, outputs) if may(call.op) else None
        values = {value: outputs[port] for port, value in call.op.call.outputs.items()}
        loops = dict(partition.loops)
        op = self._foreseen_op(partition, call.op.next, values, loops)
        if op is None or op.pulls or not may(op) or not self._run.has_room(op):
            return None
        partition.ahead = self._run.make_call(partition, op, values, loops)
        return partition.ahead

    def _token_may_go_on(self, stop: TokenStop, more: int) -> bool:
        """Whether a loop that *stop* ends may go on after *more* tokens that were not judged yet."""
        params = self._run.request.sampling.get(stop.sampler) or DEFAULTS
        if params.grammar is not None:  # the next step's mask depends on this token
            return False
        return self._run.generated.get(stop.sampler, 0) + more < params.max_tokens

    def _foreseen_op(
        self, partition: Partition, pc: int, values: Mapping[str, Ref], loops: dict[LoopOp, int]
    ) -> CallOp | None:
        while True:
            op = partition.program[pc]
            if isinstance(op, CallOp):
                return op
            if isinstance(op, LoopEndOp):
                loops[op.loop] += 1
                pc = op.head
            elif isinstance(op, LoopOp):
                iteration = loops.setdefault(op, 0)
                if self._is_over(op, iteration):
                    del loops[op]
                    pc = op.exit
                    continue
                if not all(self._may_go_on(stop, iteration, values) for stop in op.stops):
                    return None
                pc = op.body
            else:
                return None

    def _is_over(self, loop: LoopOp, iteration: int) -> bool:
        """Whether *loop* certainly ends before *iteration*: its number is known, whatever else may end it."""
        return any(isinstance(stop, Times) and iteration >= self._run.times(stop) for stop in loop.stops)

    def _may_go_on(self, stop: Stop, iteration: int, values: Mapping[str, Ref]) -> bool:
        """Whether a loop goes on as far as *stop* is concerned, or is likely to."""
        if isinstance(stop, Times):  # it is not over
            return True
        if not isinstance(stop, TokenStop):
            return False
        ref = values.get(stop.value) or self._run.values[stop.value]
        return self._token_may_go_on(stop, int(self._run.judged.get(stop.sampler) is not ref))

    def adopt(self, partition: Partition, op: CallOp) -> bool:
        """Whether *op* was foreseen with the inputs that it has now: then it is on its way already."""
        ahead = partition.ahead
        if ahead is None or ahead.op is not op:
            return False
        if op.again is not None and all(ahead.inputs[port] is self._run.values.get(value) for port, value in op.reads):
            partition.ahead = None
            return True
        inputs = self._run.inputs_of(op, {}, partition.loops, {})
        for port, value in inputs.items():
            foreseen = ahead.inputs[port]
            if foreseen is not value and (isinstance(value, Ref) or foreseen != value):
                return False
        partition.ahead = None
        return True

    @staticmethod
    def give_up(partition: Partition) -> CallRun | None:
        """The call that was foreseen and is not what *partition* has come to."""
        ahead, partition.ahead = partition.ahead, None
        return ahead
