"""Loops under way whose body is one call that feeds itself: decode steps.

What each round needs is looked up once for a request, since rounds are many and a step has hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mstar.graph.calls import CallRun, Partition
from mstar.graph.program import CallOp
from mstar.graph.streams import InnerStream, OutStream
from mstar.graph.values import Ref
from mstar.spec.graph import Times, TokenStop
from mstar.spec.request import SamplingParams

if TYPE_CHECKING:
    from mstar.graph.run import RequestRun

__all__ = ["DEFAULTS", "Again"]

DEFAULTS = SamplingParams()
"""Of a sampler that the request says nothing about."""


class Again:
    """The loop of one request all of whose body is *op* (:attr:`~mstar.graph.program.CallOp.again`)."""

    __slots__ = ("_feeds", "_limits", "_loop", "_op", "_reads", "_run", "_streams", "_times", "_tokens")

    def __init__(self, run: RequestRun, op: CallOp):
        assert op.again is not None
        self._run, self._op, self._loop, self._feeds, self._reads = run, op, op.loops[-1], op.again, op.reads
        self._tokens = [stop for stop in self._loop.stops if isinstance(stop, TokenStop)]
        self._times = [run.times(stop) for stop in self._loop.stops if isinstance(stop, Times)]
        self._limits = [(stop.sampler, _most(run, stop)) for stop in self._tokens]
        self._streams: list[InnerStream | OutStream] = [run.inner.get(name) or run.out[name] for _, name in op.emits]

    def foresee(self, call: CallRun, outputs: Mapping[str, Ref]) -> CallRun | None:
        """The call of the round after *call*'s, whose *outputs* the host does not know yet; ``None`` if there will
        surely be none, or if it has to wait."""
        run, op, partition = self._run, self._op, call.partition
        if partition.joins or partition.ahead is not None:
            return None
        for sampler, most in self._limits:
            if run.generated.get(sampler, 0) >= most:
                return None
        for times in self._times:
            if partition.loops[self._loop] + 1 >= times:
                return None
        for stream in self._streams:
            if stream.full:
                return None
        inputs = call.inputs.copy()
        for port, output in self._feeds:
            inputs[port] = outputs[output]
        length = 1 if op.primary is None else inputs[op.primary].length
        ahead = partition.ahead = CallRun(run, partition, op, inputs, length)
        ahead.again = None if self._times else self  # what follows the last round is foreseen by others
        return ahead

    def goes_on(self, partition: Partition) -> bool:
        """Whether the loop goes on with the call that was foreseen, a round having ended: what a walk's control
        operations would find one by one, and do find where this says no."""
        ahead, loop, run = partition.ahead, self._loop, self._run
        if ahead is None or ahead.op is not self._op or loop.progress is not None:
            return False
        for stop in self._tokens:
            if run.judge_token(partition, stop) is not None:  # judging the same token once more counts for nothing
                return False
        done = partition.loops[loop] + 1
        for times in self._times:
            if done >= times:
                return False
        inputs, values = ahead.inputs, run.values
        for port, value in self._reads:
            if inputs[port] is not values.get(value):
                return False
        partition.loops[loop], partition.ahead = done, None
        return True


def _most(run: RequestRun, stop: TokenStop) -> int:
    """While fewer tokens than this were judged, the loop may go on after one more. A grammar's mask depends on the
    token, so that nothing can be foreseen."""
    params = run.request.sampling.get(stop.sampler) or DEFAULTS
    return 0 if params.grammar is not None else params.max_tokens - 1
