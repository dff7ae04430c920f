"""One request's walk over the graph: its partitions' routes, its values, its streams and the calls that are ready.

The worker calls :meth:`RequestRun.start`, takes :attr:`RequestRun.ready`, runs those calls in whatever batches it
likes, and hands each result to :meth:`RequestRun.complete`; new ready calls appear until :attr:`RequestRun.finished`.

*Look-ahead.* While a call still runs, :meth:`RequestRun.foresee` gives the one that will follow unless a loop ends; it
may be launched at once. When the first call's result is complete, the walk goes on as ever, and where it comes to the
foreseen call takes that instead of making one; if it comes to something else, the foreseen call is in
:attr:`RequestRun.void` and must leave no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.graph.program import CallOp, EndOp, ForkOp, JoinOp, LoopEndOp, LoopOp, Op, Plan
from mstar.graph.streams import Chunk, InnerStream, OutStream
from mstar.graph.values import Ref, as_tensor, torch_dtype
from mstar.nn.model import Outcome, Run
from mstar.spec.check import params_of
from mstar.spec.errors import GraphError, RequestError, nearest
from mstar.spec.graph import CLIENT, AtEnd, Const, EndOf, Index, Left, Param, Pull, Stop, Times, TokenStop
from mstar.spec.request import Emit, EngineRequest, Push, SamplingParams, TokenLogprob

__all__ = ["CallRun", "RequestRun"]

_DEFAULTS = SamplingParams()

Route = Generator[Run, Outcome, None]


class CallRun:
    """One call of one request that is ready to run, or partly run.

    :param inputs: port → value or scalar. :param length: items along the primary packed input. :param done: items that
        earlier chunks (or a prefix cache) have run; :attr:`chunks` counts them.
    :ivar item: the scheduler's, once it has been told. :ivar flight: the step that runs it, as its row :attr:`index`.
    :ivar dropped: it was foreseen and is not to be.
    """

    __slots__ = (
        *("chunks", "done", "dropped", "flight", "index", "inputs", "item"),
        *("length", "op", "partial", "partition", "run"),
    )

    def __init__(self, run: RequestRun, partition: _Partition, op: CallOp, inputs: dict[str, Any], length: int):
        self.run, self.partition, self.op, self.inputs, self.length = run, partition, op, inputs, length
        self.done = self.chunks = 0
        self.partial: dict[str, list[Tensor]] | None = None
        self.item: Any = None
        self.flight: Any = None
        self.index, self.dropped = 0, False

    @property
    def remaining(self) -> int:
        return self.length - self.done

    @property
    def decode(self) -> bool:
        """Whether the call belongs to a loop that is under way: its request waits for little and holds much."""
        return bool(self.op.loops)

    @property
    def group(self) -> tuple[Any, ...]:
        """Calls of one group may share a step."""
        op = self.op
        if not op.varying:
            return op.group
        shapes = tuple(tuple(v.tensor().shape) for v in (self.inputs[p] for p in op.shaped) if isinstance(v, Ref))
        return (*op.group, shapes, tuple(p for p in op.optional if self.inputs.get(p) is not None))


class _Partition:
    """A route in progress: the current walk's program, its loop counters and joins. *ahead*: a foreseen call."""

    __slots__ = (
        "ahead",
        "finished",
        "joins",
        "loops",
        "name",
        "program",
        "reason",
        "route",
        "signals",
        "walk",
        "walks",
    )

    def __init__(self, name: str, walks: tuple[str, ...], route: Route):
        self.name, self.walks, self.route = name, walks, route
        self.walk = ""
        self.program: list[Op] = []
        self.loops: dict[LoopOp, int] = {}
        self.joins: dict[ForkOp, int] = {}
        self.signals: tuple[str, ...] = ()
        self.reason = "done"
        self.finished = False
        self.ahead: CallRun | None = None


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
        self._emit = emit
        graph = plan.graph
        self.ready: list[CallRun] = []
        self.void: list[CallRun] = []
        self._blocked: list[tuple[_Partition, CallOp]] = []
        self.values: dict[str, Ref] = {}
        self.inner = {s.name: InnerStream(s) for s in graph.streams if s.target != CLIENT}
        self.out = {s.name: OutStream(s) for s in graph.streams if s.target == CLIENT}
        self.partitions = [_Partition(p.name, p.walks, routes(p.name, request)) for p in graph.partitions]
        self.generated: dict[str, int] = {}  # sampler → tokens judged so far
        self._judged: dict[str, Ref] = {}  # sampler → the last token judged
        self.rows: dict[CallOp, Any] = {}  # the engine's: what it knows of a call's rows
        self._load_inputs()

    # --- inputs -------------------------------------------------------------------------------------------------------
    def _load_inputs(self) -> None:
        inputs = dict(self.request.inputs)
        for port in self.plan.graph.inputs:
            array = inputs.pop(port.name, None)
            if array is None:
                if not port.optional:
                    raise RequestError(f"the request lacks input {port.name!r}", param=port.name, code="missing_input")
                continue
            tensor = as_tensor(array, port, self.device, self.dtype)
            if not _fits(tuple(tensor.shape), port.shape):
                raise RequestError(
                    f"input {port.name!r} must have shape {port.shape}, got {tuple(tensor.shape)}", param=port.name
                )
            host = array.tolist() if port.dtype.startswith("int") and tensor.ndim == 1 else None
            self.values[port.name] = Ref.whole(tensor, host=host)
        for stream in self.plan.graph.streams_from(CLIENT):
            self._open_client_stream(self.inner[stream.name], inputs.pop(stream.name, None))
        if inputs:
            name = next(iter(inputs))
            known = [p.name for p in self.plan.graph.inputs]
            raise RequestError(f"unknown input {name!r}{nearest(name, known)}", param=name, code="unknown_parameter")

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
        self._poke()

    def ack(self, stream: str, emissions: int) -> None:
        out = self.out.get(stream)
        if out is not None:
            was_full = out.full
            out.ack(emissions)
            if was_full:
                self._poke()

    # --- progress -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        for partition in self.partitions:
            self._next_walk(partition, None)

    @property
    def finished(self) -> bool:
        return all(p.finished for p in self.partitions)

    @property
    def reasons(self) -> dict[str, str]:
        return {p.name: p.reason for p in self.partitions}

    def deadline(self, partition: str, now: float) -> float | None:
        """The earliest playback deadline of the client streams that *partition* feeds."""
        feeds = self.plan.feeds[partition]
        return min(self.out[name].deadline(now) for name in feeds) if feeds else None

    def complete(self, call: CallRun, outputs: Mapping[str, Ref], logprobs: list[TokenLogprob] | None = None) -> None:
        """*call* has run whole: keep its outputs, push its emissions, go on after it."""
        spec = call.op.call
        for port, value in spec.outputs.items():
            self.values[value] = outputs[port]
        changed = bool(call.op.pulls)  # a pull may have made room for a writer
        for port, name in spec.emit.items():
            changed |= self._write(name, outputs[port], logprobs)
        self._advance(call.partition, call.op.next)
        if call.partition.ahead is not None:
            self.void.append(call.partition.ahead)
            call.partition.ahead = None
        if changed:
            self._poke()

    def _write(self, name: str, ref: Ref, logprobs: list[TokenLogprob] | None) -> bool:
        out = self.out.get(name)
        if out is None:
            stream = self.inner[name]
            rank = len(stream.spec.port.shape)
            value = ref.tensor()
            stream.write(value if value.ndim > rank else value[None])
            return True
        data, count = out.payload(ref)
        if count:
            seq = out.sent(count, time.monotonic())
            self._emit(Emit(id=self.request.id, stream=name, seq=seq, data=data, logprobs=logprobs))
        return False

    def _tell(self, loop: LoopOp, name: str, done: int) -> None:
        """Tell the client that *done* iterations of *loop* are over, if it wants to hear it and keeps up."""
        out = self.out[name]
        if out.full or out.spec.modality not in self.request.want:
            return
        total = min((self._times(stop) for stop in loop.stops if isinstance(stop, Times)), default=0)
        data = np.array([[done, total]], dtype=np.int64)
        self._emit(Emit(id=self.request.id, stream=name, seq=out.sent(1, time.monotonic()), data=data))

    def _next_walk(self, partition: _Partition, outcome: Outcome | None) -> None:
        try:
            run = next(partition.route) if outcome is None else partition.route.send(outcome)
        except StopIteration:
            self._end_partition(partition)
            return
        if run.walk not in partition.walks:
            raise GraphError(partition.name, [f"its route chose walk {run.walk!r}{nearest(run.walk, partition.walks)}"])
        partition.walk, partition.program, partition.signals = run.walk, self.plan.programs[run.walk], run.signals
        partition.loops, partition.joins, partition.reason = {}, {}, "done"
        self._advance(partition, 0)

    def _end_partition(self, partition: _Partition) -> None:
        partition.finished = True
        for stream in self.inner.values():
            if stream.spec.source == partition.name:
                stream.end()
            if stream.spec.target == partition.name:
                stream.close()
        self._poke()

    def _advance(self, partition: _Partition, pc: int) -> None:
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
                reason = self._stopped(op, partition.loops.setdefault(op, 0))
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

    def _end_walk(self, partition: _Partition, op: EndOp) -> None:
        signals = {name: self.values[name].to_host() for name in partition.signals}
        self._next_walk(partition, Outcome(partition.walk, partition.reason, signals))

    # --- look-ahead ---------------------------------------------------------------------------------------------------
    def foresee(self, call: CallRun, outputs: Mapping[str, Ref], may: Callable[[CallOp], bool]) -> CallRun | None:
        """The call that follows *call*, whose *outputs* the host does not know yet, unless they end a loop.

        ``None`` if that cannot be told: a stop that is no token's, a stream to wait for, the end of a walk.

        :param may: whether an operation may be launched before it is certain.
        """
        partition = call.partition
        if partition.joins or partition.ahead is not None:
            return None
        if call.op.again is not None and call.op.loops[-1] in partition.loops:
            return self._foresee_again(call, outputs, may)
        values = {value: outputs[port] for port, value in call.op.call.outputs.items()}
        loops = dict(partition.loops)
        op = self._foreseen_op(partition, call.op.next, values, loops)
        if op is None or op.pulls or not may(op) or not self._has_room(op):
            return None
        partition.ahead = self._call(partition, op, values, loops)
        return partition.ahead

    def _foresee_again(
        self, call: CallRun, outputs: Mapping[str, Ref], may: Callable[[CallOp], bool]
    ) -> CallRun | None:
        """:meth:`foresee` for a loop under way whose body is *call* alone."""
        op, partition = call.op, call.partition
        loop = op.loops[-1]
        iteration = partition.loops[loop] + 1
        for stop in loop.stops:
            if isinstance(stop, Times):
                if iteration >= self._times(stop):
                    return None
            elif not self._token_may_go_on(stop, 1):
                return None
        if not may(op) or not self._has_room(op):
            return None
        inputs = dict(call.inputs)
        for port, output in op.again or ():
            inputs[port] = outputs[output]
        length = 1 if op.primary is None else inputs[op.primary].length
        ahead = partition.ahead = CallRun(self, partition, op, inputs, length)
        return ahead

    def _token_may_go_on(self, stop: Stop, more: int) -> bool:
        """Whether a loop that *stop* ends may go on after *more* tokens that were not judged yet."""
        assert isinstance(stop, TokenStop)
        params = self.request.sampling.get(stop.sampler) or _DEFAULTS
        if params.grammar is not None:  # the next step's mask depends on this token
            return False
        return self.generated.get(stop.sampler, 0) + more < params.max_tokens

    def _foreseen_op(
        self, partition: _Partition, pc: int, values: Mapping[str, Ref], loops: dict[LoopOp, int]
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
                if not all(self._may_go_on(stop, iteration, values) for stop in op.stops):
                    return None
                pc = op.body
            else:
                return None

    def _may_go_on(self, stop: Stop, iteration: int, values: Mapping[str, Ref]) -> bool:
        """Whether a loop goes on as far as *stop* is concerned, or is likely to."""
        if isinstance(stop, Times):
            return iteration < self._times(stop)
        if not isinstance(stop, TokenStop):
            return False
        ref = values.get(stop.value) or self.values[stop.value]
        return self._token_may_go_on(stop, int(self._judged.get(stop.sampler) is not ref))

    def _adopt(self, partition: _Partition, op: CallOp) -> bool:
        """Whether *op* was foreseen with the inputs that it has now: then it is on its way already."""
        ahead = partition.ahead
        if ahead is None or ahead.op is not op:
            return False
        if op.again is not None and all(ahead.inputs[port] is self.values.get(value) for port, value in op.reads):
            partition.ahead = None
            return True
        inputs = self._inputs(op, {}, partition.loops, {})
        for port, value in inputs.items():
            foreseen = ahead.inputs[port]
            if foreseen is not value and (isinstance(value, Ref) or foreseen != value):
                return False
        partition.ahead = None
        return True

    # --- loops --------------------------------------------------------------------------------------------------------
    def _stopped(self, op: LoopOp, iteration: int) -> str | None:
        for stop in op.stops:
            reason = self._judge(stop, iteration)
            if reason is not None:
                return reason
        return None

    def _judge(self, stop: Stop, iteration: int) -> str | None:
        if isinstance(stop, TokenStop):
            return self._judge_token(stop)
        if isinstance(stop, Times):
            return "done" if iteration >= self._times(stop) else None
        if isinstance(stop, EndOf):
            return "end_of_input" if self.inner[stop.stream].drained else None
        return "done" if iteration and self.values[stop.value].to_host() else None

    def _times(self, stop: Times) -> int:
        count: int = self._param(stop.count) if isinstance(stop.count, Param) else stop.count
        return count

    def _judge_token(self, stop: TokenStop) -> str | None:
        params = self.request.sampling.get(stop.sampler) or _DEFAULTS
        ref = self.values[stop.value]
        count = self.generated.get(stop.sampler, 0)
        if self._judged.get(stop.sampler) is not ref:  # the same token may be judged by a nested loop
            count += 1
            self.generated[stop.sampler], self._judged[stop.sampler] = count, ref
        if count >= params.min_tokens and not params.ignore_eos and ref.to_host() in params.stop_token_ids:
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
    def _offer(self, partition: _Partition, op: CallOp) -> int | None:
        """Make *op* ready, or leave it waiting for a stream. Returns where to go on if a stream's end stops its
        loop."""
        if self._adopt(partition, op):
            return None
        if not self._has_room(op):
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
        self.ready.append(self._call(partition, op, {}, partition.loops))
        return None

    def _has_room(self, op: CallOp) -> bool:
        for name in op.call.emit.values():
            out = self.out.get(name)
            if out.full if out is not None else self.inner[name].full:
                return False
        return True

    def _poke(self) -> None:
        """Something about a stream has changed: try the waiting calls again."""
        if not self._blocked:
            return
        blocked, self._blocked = self._blocked, []
        for partition, op in blocked:
            pc = self._offer(partition, op)
            if pc is not None:
                self._advance(partition, pc)

    def _call(
        self, partition: _Partition, op: CallOp, values: Mapping[str, Ref], loops: Mapping[LoopOp, int]
    ) -> CallRun:
        chunks = {pull.stream: self._pull(pull) for _, pull in op.pulls}
        inputs = self._inputs(op, values, loops, chunks)
        length = 1
        if op.primary is not None and inputs[op.primary] is not None:
            length = inputs[op.primary].length
        return CallRun(self, partition, op, inputs, length)

    def _inputs(
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
            elif isinstance(source, AtEnd):
                inputs[port] = chunks[source.stream].last
        return inputs

    def _pull(self, pull: Pull) -> Chunk:
        stream = self.inner[pull.stream]
        if stream.ready():
            return stream.pull()
        length = 1 if stream.ended and pull.at_end == "pad" else 0
        return stream.blank(length, self.device, torch_dtype(stream.spec.port.dtype, self.dtype))
