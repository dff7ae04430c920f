"""Compiles walks to flat programs that a request's threads step through. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mstar.spec.check import loops_of
from mstar.spec.graph import (
    CLIENT,
    Ahead,
    AtEnd,
    Call,
    Draft,
    Entry,
    Graph,
    Index,
    Left,
    Loop,
    Offset,
    Par,
    Pull,
    Seq,
    Stop,
    Times,
    TokenStop,
    Walk,
    WhenTrue,
)

__all__ = [
    "CallOp",
    "DraftEndOp",
    "DraftOp",
    "EndOp",
    "ForkOp",
    "JoinOp",
    "LoopEndOp",
    "LoopOp",
    "Op",
    "Plan",
    "compile_graph",
]


@dataclass(slots=True, eq=False)
class CallOp:
    """Run *call*, then go on at *next*.

    :param host: output ports whose contents the host needs: loop ends, events to the client.
    :param shaped: stacked inputs of symbolic shape: calls only share a step when these agree.
    :param optional: inputs that may be missing: likewise.
    :param loops: enclosing loops, innermost last. :param drafts: enclosing drafts.
    :param again: for a call that is all of a loop's body and feeds itself (a decode step): which of its inputs are
        which of its outputs of the time before; the other inputs stay as they are.
    :param reads: inputs that are values of the request. :param gives: outputs that become values of it.
    :param emits: outputs that go into streams.
    :param patient: it makes pieces of a stream that another partition writes, and no call needs what it returns: only
        who reads the pieces waits for it.
    """

    call: Call
    entry: Entry
    group: tuple[str, str]
    loops: tuple[LoopOp, ...]
    drafts: tuple[DraftOp, ...] = ()
    next: int = -1
    host: frozenset[str] = frozenset()
    shaped: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    primary: str | None = None
    pulls: tuple[tuple[str, Pull], ...] = ()
    again: tuple[tuple[str, str], ...] | None = None
    reads: tuple[tuple[str, str], ...] = ()
    gives: tuple[tuple[str, str], ...] = ()
    emits: tuple[tuple[str, str], ...] = ()
    patient: bool = False

    @property
    def varying(self) -> bool:
        return bool(self.shaped or self.optional)


@dataclass(slots=True, eq=False)
class LoopOp:
    """*progress*: the stream that hears of each iteration's end."""

    stops: tuple[Stop, ...]
    body: int = -1
    exit: int = -1
    progress: str | None = None


@dataclass(slots=True, eq=False)
class LoopEndOp:
    """Behind a loop's body: back to its head, at this place in the program, to be judged."""

    loop: LoopOp
    head: int


@dataclass(slots=True, eq=False)
class DraftOp:
    """*resources* are taken back at the draft's end. *samplers*: those whose tokens its loops judge."""

    resources: tuple[str, ...]
    samplers: tuple[str, ...]


@dataclass(slots=True, eq=False)
class DraftEndOp:
    """Behind a draft's body: what its calls added to contexts is taken back."""

    draft: DraftOp


@dataclass(slots=True, eq=False)
class ForkOp:
    """Go on at each of *branches* at once, and at *next* when all have come to their join."""

    branches: list[int] = field(default_factory=list)
    next: int = -1


@dataclass(slots=True, eq=False)
class JoinOp:
    """The end of a branch of *fork*."""

    fork: ForkOp


@dataclass(slots=True, eq=False)
class EndOp:
    """The end of a walk."""


Op = CallOp | LoopOp | LoopEndOp | DraftOp | DraftEndOp | ForkOp | JoinOp | EndOp


@dataclass(frozen=True)
class Plan:
    """A checked graph, ready to run: one program per walk, plus look-ups that requests need.

    :param contexts: resource name → contexts that some call uses it in.
    :param feeds: partition → client streams with a playback clock that its work ends up in.
    """

    graph: Graph
    programs: Mapping[str, list[Op]]
    contexts: Mapping[str, tuple[str, ...]]
    feeds: Mapping[str, tuple[str, ...]]


def compile_graph(graph: Graph) -> Plan:
    """Compile every walk of a graph that :func:`mstar.spec.check.check_graph` has passed."""
    judged = frozenset[str]().union(*(_judged_values(walk) for walk in graph.walks.values()))
    programs = {name: _Compiler(graph, walk, judged).program for name, walk in graph.walks.items()}
    contexts: dict[str, set[str]] = {}
    for program in programs.values():
        for op in program:
            if isinstance(op, CallOp):
                for resource in op.entry.resources:
                    contexts.setdefault(resource, set()).add(op.call.context)
    return Plan(graph, programs, {k: tuple(sorted(v)) for k, v in contexts.items()}, _feeds(graph))


def _feeds(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Follow streams downstream from each partition to the client streams that somebody listens to in real time."""
    feeds = {}
    for partition in graph.partitions:
        seen, todo, found = {partition.name}, [partition.name], []
        while todo:
            for stream in graph.streams_from(todo.pop()):
                if stream.target == CLIENT:
                    if stream.seconds_per_item is not None:
                        found.append(stream.name)
                elif stream.target not in seen:
                    seen.add(stream.target)
                    todo.append(stream.target)
        feeds[partition.name] = tuple(found)
    return feeds


class _Compiler:
    def __init__(self, graph: Graph, walk: Walk, judged: frozenset[str]):
        self.graph, self.judged = graph, judged
        self.program: list[Op] = []
        self._emit(walk, (), ())
        self.program.append(EndOp())
        for pc, op in enumerate(self.program):  # straight-line successors
            if isinstance(op, CallOp):
                op.next = pc + 1
                after = self.program[op.next]
                if isinstance(after, LoopEndOp) and after.loop.body == pc:
                    op.again = _fed_back(op)

    def _emit(self, walk: Walk, loops: tuple[LoopOp, ...], drafts: tuple[DraftOp, ...]) -> None:
        if isinstance(walk, Call):
            self.program.append(self._call(walk, loops, drafts))
        elif isinstance(walk, Seq):
            for part in walk.parts:
                self._emit(part, loops, drafts)
        elif isinstance(walk, Loop):
            self._loop(walk, loops, drafts)
        elif isinstance(walk, Draft):
            op = DraftOp(walk.resources, tuple(sorted(_judged_samplers(walk.body))))
            self.program.append(op)
            self._emit(walk.body, loops, (*drafts, op))
            self.program.append(DraftEndOp(op))
        else:
            self._par(walk, loops, drafts)

    def _loop(self, walk: Loop, loops: tuple[LoopOp, ...], drafts: tuple[DraftOp, ...]) -> None:
        op, head = LoopOp(walk.stops, progress=walk.progress), len(self.program)
        self.program.append(op)
        op.body = len(self.program)
        self._emit(walk.body, (*loops, op), drafts)
        self.program.append(LoopEndOp(op, head))
        op.exit = len(self.program)

    def _par(self, walk: Par, loops: tuple[LoopOp, ...], drafts: tuple[DraftOp, ...]) -> None:
        fork = ForkOp()
        self.program.append(fork)
        for part in walk.parts:
            fork.branches.append(len(self.program))
            self._emit(part, loops, drafts)
            self.program.append(JoinOp(fork))
        fork.next = len(self.program)

    def _call(self, call: Call, loops: tuple[LoopOp, ...], drafts: tuple[DraftOp, ...]) -> CallOp:
        entry = self.graph.node(call.node).entry(call.entry)
        host = {port for port, value in call.outputs.items() if value in self.judged}
        for port, name in call.emit.items():
            stream = self.graph.stream(name)
            if stream.target == CLIENT or stream.codes is not None:
                host.add(port)
            if stream.codes is not None:
                host.add(stream.codes.token)
        pulls = tuple((port, s) for port, s in call.inputs.items() if isinstance(s, Pull))
        packed = [p.name for p in entry.inputs if p.layout == "packed" and p.name in call.inputs]
        return CallOp(
            call,
            entry,
            (call.node, call.entry),
            loops,
            drafts,
            host=frozenset(host),
            shaped=tuple(
                p.name for p in entry.inputs if p.layout == "stacked" and any(isinstance(d, str) for d in p.shape)
            ),
            optional=tuple(p.name for p in entry.inputs if p.optional),
            primary=entry.chunk or (packed[0] if packed else None),
            pulls=pulls,
            reads=tuple((port, s) for port, s in call.inputs.items() if isinstance(s, str)),
            gives=tuple(call.outputs.items()),
            emits=tuple(call.emit.items()),
            patient=bool(pulls)
            and not call.outputs
            and all(self.graph.stream(pull.stream).source != CLIENT for _, pull in pulls),
        )


def _fed_back(op: CallOp) -> tuple[tuple[str, str], ...] | None:
    """See :attr:`CallOp.again`."""
    if any(not isinstance(stop, TokenStop | Times) for stop in op.loops[-1].stops):
        return None
    made = {value: port for port, value in op.call.outputs.items()}
    found = []
    for port, source in op.call.inputs.items():
        if isinstance(source, Pull | Index | Left | Ahead | Offset | AtEnd):
            return None
        if isinstance(source, str) and source in made:
            found.append((port, made[source]))
    return tuple(found)


def _judged_values(walk: Walk) -> frozenset[str]:
    """Values that some loop of *walk* looks at on the host."""
    if isinstance(walk, Call):
        return frozenset()
    if isinstance(walk, Loop):
        own = {s.value for s in walk.stops if isinstance(s, TokenStop | WhenTrue)}
        return frozenset(own) | _judged_values(walk.body)
    if isinstance(walk, Draft):
        return _judged_values(walk.body)
    return frozenset().union(*(_judged_values(part) for part in walk.parts))


def _judged_samplers(walk: Walk) -> frozenset[str]:
    """Samplers whose tokens some loop of *walk* judges."""
    return frozenset(s.sampler for loop in loops_of(walk) for s in loop.stops if isinstance(s, TokenStop))
