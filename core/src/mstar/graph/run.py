"""One request's walk over the graph: its partitions' routes, its values, its streams and the calls that are ready.

The worker calls :meth:`RequestRun.start`, takes :attr:`RequestRun.ready`, runs those calls in whatever batches it
likes, and hands each result to :meth:`RequestRun.complete`; new ready calls appear until :attr:`RequestRun.finished`.

*Look-ahead.* While a call still runs, :attr:`RequestRun.foresight` gives the one that will follow unless a loop ends;
it may be launched at once. When the first call's result is complete, the walk goes on as ever, and where it comes to
the foreseen call takes that instead of making one; if it comes to something else, the foreseen call is in
:attr:`RequestRun.void` and must leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mstar.graph.again import DEFAULTS, Again
from mstar.graph.calls import CallRun, Drafted, Partition, Route
from mstar.graph.code_streams import CodeStream
from mstar.graph.emissions import Emissions
from mstar.graph.foresight import Foresight
from mstar.graph.program import CallOp, DraftEndOp, DraftOp, EndOp, ForkOp, JoinOp, LoopEndOp, LoopOp, Plan
from mstar.graph.streams import Chunk, InnerStream, OutStream, fresh
from mstar.graph.values import Ref, as_tensor, torch_dtype
from mstar.nn.model import Outcome
from mstar.spec.check import params_of
from mstar.spec.errors import GraphError, RequestError, nearest
from mstar.spec.graph import (
    CLIENT,
    Ahead,
    AtEnd,
    Const,
    EndOf,
    Index,
    Left,
    Offset,
    Param,
    Port,
    Pull,
    Stop,
    Times,
    TokenStop,
)
from mstar.spec.request import Emit, EngineRequest, Push, TokenLogprob

__all__ = ["RequestRun"]


def _fits(shape: tuple[int, ...], declared: tuple[str | int, ...]) -> bool:
    """Whether *shape* has the dimensions that a port declares; those that are symbols may have any size."""
    return len(shape) == len(declared) and all(
        isinstance(want, str) or want == got for want, got in zip(declared, shape, strict=True)
    )


class RequestRun:
    """The run-time state of one request. Not thread-safe; belongs to one worker.

    :param emit: called with each :class:`~mstar.spec.request.Emit` for the client.
    """

    def __init__(
        self,
        plan: Plan,
        request: EngineRequest,
        routes: Callable[[str, EngineRequest], Route],
        emit: Callable[[Emit], None],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.plan, self.request, self.device, self.dtype = plan, request, device, dtype
        self._live = bool(request.client_streams)
        graph = plan.graph
        self.ready: list[CallRun] = []
        self.void: list[CallRun] = []
        self.taken_back: list[tuple[str, str, int]] = []  # (resource, context, tokens) of drafts that have ended
        self._blocked: list[tuple[Partition, CallOp]] = []
        self.values: dict[str, Ref] = {}
        self.inner = {
            s.name: InnerStream(s) if s.codes is None else CodeStream(s) for s in graph.streams if s.target != CLIENT
        }
        self.out = {s.name: OutStream(s) for s in graph.streams if s.target == CLIENT}
        self.emissions = Emissions(request, self.out, self.inner, emit)
        self.partitions = [
            Partition(p.name, p.walks, routes(p.name, request), tuple(self.out[name] for name in plan.feeds[p.name]))
            for p in graph.partitions
        ]
        self._walking = len(self.partitions)  # those whose routes have not ended
        self.generated: dict[str, int] = {}  # sampler → tokens judged so far
        self.judged: dict[str, Ref] = {}  # sampler → the last token judged
        self.drafted = 0  # tokens judged in drafts that have ended: they count for no limit
        self.rows: dict[CallOp, Any] = {}  # the engine's: what it knows of a call's rows
        self.over = False  # the request has ended: none of its calls is to run or to go on
        self.foresight = Foresight(self)
        self._agains: dict[CallOp, Again] = {}
        self._load_inputs()

    # --- inputs -------------------------------------------------------------------------------------------------------
    def _load_inputs(self) -> None:
        inputs = dict(self.request.inputs)
        for port in self.plan.graph.inputs:
            array = inputs.pop(port.name, None)
            if array is not None:
                self._set_input(port, array)
            elif not port.optional:
                raise RequestError(f"the request lacks input {port.name!r}", param=port.name, code="missing_input")
        for stream in self.plan.graph.streams_from(CLIENT):
            self._open_client_stream(self.inner[stream.name], inputs.pop(stream.name, None))
        for stream in self.plan.graph.streams:
            if stream.primed is not None and stream.primed in self.values:
                self.inner[stream.name].prime(self.values[stream.primed].tensor())
        if inputs:
            name = next(iter(inputs))
            known = [p.name for p in self.plan.graph.inputs]
            raise RequestError(f"unknown input {name!r}{nearest(name, known)}", param=name, code="unknown_parameter")

    def _set_input(self, port: Port, array: Any) -> None:
        tensor = as_tensor(array, port, torch.device("cpu") if port.host else self.device, self.dtype)
        if not _fits(tuple(tensor.shape), port.shape):
            raise RequestError(
                f"input {port.name!r} must have shape {port.shape}, got {tuple(tensor.shape)}", param=port.name
            )
        host = array.tolist() if port.dtype.startswith("int") and tensor.ndim == 1 else None
        self.values[port.name] = Ref.whole(tensor, host=host)

    def _open_client_stream(self, stream: InnerStream, first: Any) -> None:
        if first is not None:
            stream.write_from_client(self._client_items(stream, first))
        if stream.spec.name not in self.request.client_streams:
            stream.end()

    def _client_items(self, stream: InnerStream, data: Any) -> Tensor:
        port, name = stream.spec.port, stream.spec.name
        items = as_tensor(data, port, self.device, self.dtype, name)
        if not items.ndim or not _fits(tuple(items.shape[1:]), port.shape):
            raise RequestError(
                f"stream {name!r} takes items of shape {port.shape}, got an array of shape {tuple(items.shape)}",
                param=name,
            )
        return items

    def push(self, push: Push) -> None:
        """Items from the client; raises :class:`RequestError` for an unknown stream or too much."""
        stream = self.inner.get(push.stream)
        if stream is None or stream.spec.source != CLIENT:
            known = [s.name for s in self.plan.graph.streams_from(CLIENT)]
            raise RequestError(f"unknown stream {push.stream!r}{nearest(push.stream, known)}", param=push.stream)
        if push.data is not None:
            stream.write_from_client(self._client_items(stream, push.data))
        if push.end:
            stream.end()
        self.poke()

    def ack(self, stream: str, emissions: int) -> None:
        out = self.out.get(stream)
        if out is not None:
            was_full = out.full
            out.ack(emissions)
            if was_full:
                self.poke()

    # --- progress -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        for partition in self.partitions:
            self._next_walk(partition, None)

    @property
    def finished(self) -> bool:
        return not self._walking

    @property
    def reasons(self) -> dict[str, str]:
        """Partition → why its last loop ended. A walk without one, which comes after an answer, hides nothing of it."""
        return {p.name: p.ended if p.reason == "done" else p.reason for p in self.partitions}

    def complete(self, call: CallRun, outputs: Mapping[str, Ref], logprobs: list[TokenLogprob] | None = None) -> None:
        """*call* has run whole: keep its outputs, push its emissions, go on after it."""
        op, partition = call.op, call.partition
        for port, value in op.gives:
            self.values[value] = outputs[port]
        for draft in op.drafts:
            self._count(partition.drafts[draft], draft, call)
        changed = bool(op.pulls)  # a pull may have made room for a writer
        for port, name in op.emits:
            stream = self.inner.get(name)
            if isinstance(stream, CodeStream):
                if stream.write_code(outputs[stream.token].to_host(), outputs[port].to_host(), call.heard):
                    changed |= stream.ready()
            else:
                changed |= self._write(name, outputs[port], logprobs, call)
        if op.again is None or partition.ahead is None or not self.again(op).goes_on(partition):
            self.leave(call)
        if changed:
            self.poke()

    def leave(self, call: CallRun) -> None:
        """Go on after *call*, whose outputs are there."""
        self._advance(call.partition, call.op.next)
        ahead = self.foresight.give_up(call.partition)
        if ahead is not None:
            self.void.append(ahead)

    def again(self, op: CallOp) -> Again:
        """The loop whose body is *op* alone."""
        found = self._agains.get(op)
        if found is None:
            found = self._agains[op] = Again(self, op)
        return found

    @staticmethod
    def _count(drafted: Drafted, draft: DraftOp, call: CallRun) -> None:
        """Keep how far *call* has advanced what will be taken back."""
        entry = call.op.entry
        for name in draft.resources:
            if name in entry.resources and name not in entry.frozen:
                drafted.tokens[name, call.op.call.context] += call.length

    def _write(
        self,
        name: str,
        ref: Ref,
        logprobs: list[TokenLogprob] | None,
        call: CallRun,
    ) -> bool:
        """Push what *call* emits. Returns whether a reader may go on: it waits for whole chunks."""
        stream = self.inner.get(name)
        if stream is not None:
            if stream.spec.fresh is not None:
                ref, _ = fresh(ref, stream.spec.fresh, call.pulled[stream.spec.fresh.pull], host=False)
            value = ref.tensor()
            stream.write(value if value.ndim > len(stream.spec.port.shape) else value[None], call.heard)
            return stream.ready()
        self.emissions.write(name, ref, logprobs, call)
        return False

    def _tell(self, loop: LoopOp, name: str, done: int) -> None:
        """Tell the client that *done* iterations of *loop* are over."""
        total = min((self.times(stop) for stop in loop.stops if isinstance(stop, Times)), default=0)
        self.emissions.tell(name, done, total)

    def _next_walk(self, partition: Partition, outcome: Outcome | None) -> None:
        try:
            run = next(partition.route) if outcome is None else partition.route.send(outcome)
        except StopIteration:
            self._end_partition(partition)
            return
        if run.walk not in partition.walks:
            raise GraphError(partition.name, [f"its route chose walk {run.walk!r}{nearest(run.walk, partition.walks)}"])
        partition.walk, partition.program, partition.signals = run.walk, self.plan.programs[run.walk], run.signals
        partition.loops, partition.joins, partition.drafts, partition.reason = {}, {}, {}, "done"
        partition.said = {sampler: [] for sampler in run.tokens}
        for name, value in run.values.items():
            port = self._input_named(partition, name)
            if value is None:
                self.values.pop(name, None)
                self.request.inputs.pop(name, None)
            else:
                self._set_input(port, value)
        self._advance(partition, 0)

    def _input_named(self, partition: Partition, name: str) -> Port:
        ports = {port.name: port for port in self.plan.graph.inputs}
        if name not in ports:
            raise GraphError(partition.name, [f"its route sets {name!r}, which is no input{nearest(name, ports)}"])
        return ports[name]

    def _end_partition(self, partition: Partition) -> None:
        self._walking -= 1
        for stream in self.inner.values():
            if stream.spec.source == partition.name:
                stream.end()
            if stream.spec.target == partition.name:
                stream.close()
        self.emissions.send_held(partition.name)
        self.poke()

    def _advance(self, partition: Partition, pc: int) -> None:
        """Run control operations from *pc* until calls are ready or waiting, or the walk is over."""
        program = partition.program
        while True:
            op = program[pc]
            if isinstance(op, CallOp):
                exit_pc = self._offer(partition, op)
                if exit_pc is None:
                    return
                pc = exit_pc
            elif isinstance(op, LoopOp):
                reason = self._stopped(partition, op, partition.loops.setdefault(op, 0))
                if reason is None:
                    pc = op.body
                else:
                    del partition.loops[op]
                    partition.reason = reason
                    pc = op.exit
            elif isinstance(op, LoopEndOp):
                partition.loops[op.loop] += 1
                if op.loop.progress is not None:
                    self._tell(op.loop, op.loop.progress, partition.loops[op.loop])
                pc = op.head
            elif isinstance(op, DraftOp):
                partition.drafts[op] = Drafted({sampler: self.generated.get(sampler, 0) for sampler in op.samplers})
                pc += 1
            elif isinstance(op, DraftEndOp):
                self._take_back(partition.drafts.pop(op.draft))
                pc += 1
            elif isinstance(op, ForkOp):
                partition.joins[op] = len(op.branches)
                for branch in op.branches:
                    self._advance(partition, branch)
                return
            elif isinstance(op, JoinOp):
                partition.joins[op.fork] -= 1
                if partition.joins[op.fork]:
                    return
                pc = op.fork.next
            else:
                self._end_walk(partition, op)
                return

    def _end_walk(self, partition: Partition, op: EndOp) -> None:
        partition.ended = partition.ended if partition.reason == "done" else partition.reason
        signals = {name: self.values[name].to_host() for name in partition.signals}
        self._next_walk(partition, Outcome(partition.walk, partition.reason, signals, partition.said))

    def _take_back(self, drafted: Drafted) -> None:
        self.taken_back += [(name, context, count) for (name, context), count in drafted.tokens.items() if count]
        for sampler, count in drafted.before.items():
            self.drafted += self.generated.get(sampler, 0) - count
            self.generated[sampler] = count

    def let_go(self) -> None:
        """The request has ended: hold none of its values any more, without waiting for the garbage collector. What is
        held for its listener is sent."""
        self.emissions.send_held()
        if self.over:
            return
        self.over = True
        self.values, self.judged, self._agains = {}, {}, {}
        del self.foresight  # it knows this run: the request's own inputs would stay with the two of them
        for stream in self.inner.values():
            stream.close()
        for partition in self.partitions:
            partition.ahead = None

    # --- loops --------------------------------------------------------------------------------------------------------
    def _stopped(self, partition: Partition, op: LoopOp, iteration: int) -> str | None:
        for stop in op.stops:
            reason = self._judge(partition, stop, iteration)
            if reason is not None:
                return reason
        return None

    def _judge(self, partition: Partition, stop: Stop, iteration: int) -> str | None:
        if isinstance(stop, TokenStop):
            return self.judge_token(partition, stop)
        if isinstance(stop, Times):
            return "done" if iteration >= self.times(stop) else None
        if isinstance(stop, EndOf):
            return "end_of_input" if self.inner[stop.stream].drained else None
        return "done" if iteration and self.values[stop.value].to_host() else None

    def times(self, stop: Times) -> int:
        count: int = self._param(stop.count) if isinstance(stop.count, Param) else stop.count
        return count

    def judge_token(self, partition: Partition, stop: TokenStop) -> str | None:
        """Why *stop* ends its loop now, if it does. A token counts once, however often it is judged."""
        sampler = stop.sampler
        params = self.request.sampling.get(sampler) or DEFAULTS
        ref = self.values[stop.value]
        count = self.generated.get(sampler, 0)
        if self.judged.get(sampler) is not ref:  # the same token may be judged by a nested loop
            count += 1
            self.generated[sampler], self.judged[sampler] = count, ref
            if sampler in partition.said:
                partition.said[sampler].append(ref.to_host())
        if not params.ignore_eos and count >= params.min_tokens and ref.to_host() in params.stop_token_ids:
            return "stop"
        return "length" if count >= params.max_tokens else None

    def _param(self, source: Param) -> Any:
        params = self.request.params
        value = params.get(source.name, source.default)
        if value is None:
            where = next(where for where, read in params_of(self.plan.graph) if read == source)
            message = f"the request lacks parameter {source.name!r} ({where})"
            if source.name not in params:
                message += nearest(source.name, params) or "; it has none"
            raise RequestError(message, param=source.name, code="missing_input")
        return value

    # --- readiness ----------------------------------------------------------------------------------------------------
    def _offer(self, partition: Partition, op: CallOp) -> int | None:
        """Make *op* ready, or leave it waiting for a stream. Returns where to go on if a stream's end stops its
        loop."""
        if self.foresight.adopt(partition, op):
            return None
        if not self.has_room(op):
            self._blocked.append((partition, op))
            return None
        for _, pull in op.pulls:
            stream = self.inner[pull.stream]
            if stream.ready() or pull.optional:
                continue
            if not stream.ended:
                self._blocked.append((partition, op))
                return None
            if pull.at_end == "stop":
                loop = op.loops[-1]
                del partition.loops[loop]
                partition.reason = "end_of_input"
                return loop.exit
        self.ready.append(self.make_call(partition, op, {}, partition.loops))
        return None

    def has_room(self, op: CallOp) -> bool:
        for _, name in op.emits:
            stream = self.inner.get(name)
            if self.out[name].full if stream is None else stream.full:
                return False
        return True

    def poke(self) -> None:
        """Something about a stream has changed: try the waiting calls again."""
        if not self._blocked:
            return
        blocked, self._blocked = self._blocked, []
        for partition, op in blocked:
            pc = self._offer(partition, op)
            if pc is not None:
                self._advance(partition, pc)

    def make_call(
        self, partition: Partition, op: CallOp, values: Mapping[str, Ref], loops: Mapping[LoopOp, int]
    ) -> CallRun:
        chunks = {pull.stream: self._pull(pull, partition) for _, pull in op.pulls}
        inputs = self.inputs_of(op, values, loops, chunks)
        length = 1
        if op.primary is not None and inputs[op.primary] is not None:
            length = inputs[op.primary].length
        call = CallRun(self, partition, op, inputs, length)
        call.pulled = chunks
        return call

    def inputs_of(
        self, op: CallOp, values: Mapping[str, Ref], loops: Mapping[LoopOp, int], chunks: Mapping[str, Chunk]
    ) -> dict[str, Any]:
        """What goes into *op*'s ports. *values* come before those that are known."""
        inputs: dict[str, Any] = {}
        for port, source in op.call.inputs.items():
            if isinstance(source, str):
                inputs[port] = values.get(source) or self.values.get(source)
            elif isinstance(source, Pull):
                inputs[port] = chunks[source.stream].ref
            elif isinstance(source, Const):
                inputs[port] = source.value
            elif isinstance(source, Param):
                inputs[port] = self._param(source)
            elif isinstance(source, Index):
                inputs[port] = loops[op.loops[-1 - source.depth]]
            elif isinstance(source, Left):
                inputs[port] = chunks[source.stream].left
            elif isinstance(source, Ahead):
                inputs[port] = chunks[source.stream].ahead + chunks[source.stream].pad
            elif isinstance(source, Offset):
                inputs[port] = chunks[source.stream].offset
            elif isinstance(source, AtEnd):
                inputs[port] = chunks[source.stream].last
        return inputs

    def _pull(self, pull: Pull, partition: Partition) -> Chunk:
        stream = self.inner[pull.stream]
        if stream.ready():
            chunk = stream.pull()
            if self._live:
                partition.heard = stream.heard(partition.heard)
            return chunk
        length = 1 if stream.ended and pull.at_end == "pad" else 0
        return stream.blank(length, self.device, torch_dtype(stream.spec.port.dtype, self.dtype))
