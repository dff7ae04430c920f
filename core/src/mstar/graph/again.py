"""Loops under way whose body is one call that feeds itself: decode steps.

What each round needs is looked up once for a request, since rounds are many and a step has hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from mstar.graph.calls import CallRun, Partition
from mstar.graph.code_streams import CodeStream
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

    __slots__ = (
        *("_codes", "_feeds", "_limits", "_loop", "_op", "_params", "_plain", "_port"),
        *("_reads", "_run", "_sampler", "_streams", "_times", "_tokens"),
    )

    def __init__(self, run: RequestRun, op: CallOp):
        assert op.again is not None
        self._run, self._op, self._loop, self._feeds, self._reads = run, op, op.loops[-1], op.again, op.reads
        self._tokens = [stop for stop in self._loop.stops if isinstance(stop, TokenStop)]
        self._times = [run.times(stop) for stop in self._loop.stops if isinstance(stop, Times)]
        self._limits = [(stop.sampler, _most(run, stop)) for stop in self._tokens]
        self._streams: list[InnerStream | OutStream] = [run.inner.get(name) or run.out[name] for _, name in op.emits]
        self._codes = [(s, s.token, port) for s, (port, _) in zip(self._streams, op.emits, strict=True) if _codes(s)]
        # A plain round: one token is judged, and what goes out goes to streams of codes.
        made = {value: port for port, value in op.gives}
        judged = self._tokens[0] if len(self._tokens) == len(self._loop.stops) == 1 else None
        self._plain = (
            judged is not None
            and judged.value in made
            and len(self._codes) == len(op.emits)
            and not op.drafts
            and self._loop.progress is None
        )
        self._sampler, self._port = (judged.sampler, made.get(judged.value, "")) if judged is not None else ("", "")
        self._params = run.request.sampling.get(self._sampler) or DEFAULTS

    def foresee(self, call: CallRun, outputs: Mapping[str, Ref]) -> CallRun | None:
        """The call of the round after *call*'s, whose *outputs* the host does not know yet; ``None`` if there will
        surely be none, or if it has to wait."""
        run, partition = self._run, call.partition
        if partition.ahead is not None or partition.joins:
            return None
        generated = run.generated
        for sampler, most in self._limits:
            if generated.get(sampler, 0) >= most:
                return None
        if self._times and partition.loops[self._loop] + 1 >= min(self._times):
            return None
        for stream in self._streams:
            if stream.full:
                return None
        op, inputs = self._op, call.inputs.copy()
        for port, output in self._feeds:
            inputs[port] = outputs[output]
        length = 1 if op.primary is None else inputs[op.primary].length
        ahead = partition.ahead = CallRun(run, partition, op, inputs, length)
        ahead.again = None if self._times else self  # what follows the last round is foreseen by others
        return ahead

    def round(self, call: CallRun, outputs: Mapping[str, Ref]) -> bool:
        """:meth:`~mstar.graph.run.RequestRun.complete` for *call*, if its round is a plain one and was foreseen to go
        on. ``False``: it is not, and nothing was done."""
        partition, run = call.partition, self._run
        ahead = partition.ahead
        if not self._plain or ahead is None or partition.said:
            return False
        values = run.values
        for port, value in self._op.gives:
            values[value] = outputs[port]
        changed = False
        for stream, token, port in self._codes:
            if stream.write_code(outputs[token].to_host(), outputs[port].to_host(), call.heard):
                changed |= stream.ready()
        sampler, params, ref = self._sampler, self._params, outputs[self._port]
        run.judged[sampler] = ref
        count = run.generated[sampler] = run.generated.get(sampler, 0) + 1
        if (
            count < params.max_tokens
            and (params.ignore_eos or count < params.min_tokens or ref.to_host() not in params.stop_token_ids)
            and self._adopts(ahead)
        ):
            partition.loops[self._loop] += 1
            partition.ahead = None
        else:
            run.leave(call)  # where the token is judged again, which counts for nothing
        if changed:
            run.poke()
        return True

    def goes_on(self, partition: Partition) -> bool:
        """Whether the loop goes on with the call that was foreseen, a round having ended: what a walk's control
        operations would find one by one, and do find where this says no."""
        ahead, loop, run = partition.ahead, self._loop, self._run
        if ahead is None or loop.progress is not None:
            return False
        done = partition.loops[loop] + 1
        if self._times and done >= min(self._times):
            return False
        for stop in self._tokens:
            if run.judge_token(partition, stop) is not None:  # judging the same token once more counts for nothing
                return False
        if not self._adopts(ahead):
            return False
        partition.loops[loop], partition.ahead = done, None
        return True

    def _adopts(self, ahead: CallRun) -> bool:
        """Whether *ahead* is the next round with the inputs that it has now."""
        same, inputs, values = ahead.op is self._op, ahead.inputs, self._run.values
        if same:
            for port, value in self._reads:
                same = same and inputs[port] is values.get(value)
        return same


def _codes(stream: InnerStream | OutStream) -> TypeGuard[CodeStream]:
    return isinstance(stream, CodeStream)


def _most(run: RequestRun, stop: TokenStop) -> int:
    """While fewer tokens than this were judged, the loop may go on after one more. A grammar's mask depends on the
    token, so that nothing can be foreseen."""
    params = run.request.sampling.get(stop.sampler) or DEFAULTS
    return 0 if params.grammar is not None else params.max_tokens - 1
