"""Proves a graph sound before anything runs (promise P2). Pure data; every fault is reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mstar.spec.errors import GraphError, nearest
from mstar.spec.graph import (
    CLIENT,
    Ahead,
    AtEnd,
    Call,
    Const,
    Draft,
    EndOf,
    Entry,
    Graph,
    Index,
    Left,
    Loop,
    Offset,
    Par,
    Param,
    Port,
    Pull,
    Seq,
    Times,
    TokenStop,
    Walk,
    WhenTrue,
)
from mstar.spec.resources import ResourceSpec
from mstar.spec.stream_check import stream_faults

__all__ = ["calls_of", "check_graph", "faults", "loops_of", "params_of"]

_Number = Param | Index | Const | Left | Ahead | Offset | AtEnd
_FLOATS = frozenset({"model", "float64", "float32", "float16", "bfloat16"})
_DTYPES = _FLOATS | {"int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"}


def check_graph(model: str, graph: Graph, resources: Mapping[str, ResourceSpec]) -> None:
    """Raise :class:`GraphError` with every fault of *graph*."""
    found = list(faults(graph, resources))
    if found:
        raise GraphError(model, found)


def faults(graph: Graph, resources: Mapping[str, ResourceSpec]) -> Iterator[str]:
    """All that keeps *graph* from running with *resources*, a sentence each; nothing if it is sound."""
    yield from _unique("node", (n.name for n in graph.nodes))
    yield from _unique("stream", (s.name for s in graph.streams))
    yield from _unique("partition", (p.name for p in graph.partitions))
    yield from _unique("input", (p.name for p in graph.inputs))
    for port in graph.inputs:
        yield from _dtype_faults("inputs", port)
    for node in graph.nodes:
        yield from _unique(f"entry of node {node.name!r}", (e.name for e in node.entries))
        for entry in node.entries:
            yield from _entry_faults(f"node {node.name!r} entry {entry.name!r}", entry, resources)
    yield from _partition_faults(graph)
    yield from _stream_faults(graph)
    for name in graph.sessions:
        if name not in resources:
            yield f"sessions: unknown resource {name!r}{nearest(name, resources)}"
    broken = list(_reference_faults(graph))
    yield from broken
    if not broken:  # value flow means nothing while calls name nodes that do not exist
        for name, walk in graph.walks.items():
            yield from _Flow(graph, resources, name).check(walk)


def calls_of(walk: Walk) -> Iterator[Call]:
    """All calls of *walk*, in the order written."""
    if isinstance(walk, Call):
        yield walk
    elif isinstance(walk, Loop | Draft):
        yield from calls_of(walk.body)
    else:
        for part in walk.parts:
            yield from calls_of(part)


def params_of(graph: Graph) -> Iterator[tuple[str, Param]]:
    """Every parameter that *graph* reads of its requests, after the place that reads it, in words."""
    for name, walk in graph.walks.items():
        for call in calls_of(walk):
            for port, source in call.inputs.items():
                if isinstance(source, Param):
                    yield f"walk {name!r}: call of {call.node!r}: port {port!r}", source
        for loop in loops_of(walk):
            for stop in loop.stops:
                if isinstance(stop, Times) and isinstance(stop.count, Param):
                    yield f"walk {name!r}: a loop's Times", stop.count


def loops_of(walk: Walk) -> Iterator[Loop]:
    """All loops of *walk*, outer ones first."""
    if isinstance(walk, Loop):
        yield walk
        yield from loops_of(walk.body)
    elif isinstance(walk, Draft):
        yield from loops_of(walk.body)
    elif isinstance(walk, Seq | Par):
        for part in walk.parts:
            yield from loops_of(part)


def _unique(what: str, names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} {name!r} is declared twice"
        seen.add(name)


def _entry_faults(where: str, entry: Entry, resources: Mapping[str, ResourceSpec]) -> Iterator[str]:
    yield from _unique(f"{where}: input port", (p.name for p in entry.inputs))
    yield from _unique(f"{where}: output port", (p.name for p in entry.outputs))
    for name in entry.resources:
        if name not in resources:
            yield f"{where}: unknown resource {name!r}{nearest(name, resources)}"
    for name in entry.frozen:
        if name not in entry.resources:
            yield f"{where}: frozen resource {name!r} is not among its resources"
    ports = {p.name: p for p in entry.inputs}
    if entry.chunk is not None:
        port = ports.get(entry.chunk)
        if port is None:
            yield f"{where}: chunk port {entry.chunk!r} is not an input{nearest(entry.chunk, ports)}"
        elif port.layout != "packed":
            yield f"{where}: chunk port {entry.chunk!r} must be packed, is {port.layout}"
        elif entry.prefix and not port.dtype.startswith("int"):
            yield f"{where}: prefix reuse needs an integer chunk port, {entry.chunk!r} is {port.dtype}"
    elif entry.prefix:
        yield f"{where}: prefix reuse needs a chunk port"
    for port in (*entry.inputs, *entry.outputs):
        yield from _dtype_faults(where, port)
        if port.layout == "packed" and not port.shape:
            yield f"{where}: packed port {port.name!r} needs a first dimension"


def _dtype_faults(where: str, port: Port) -> Iterator[str]:
    if port.dtype not in _DTYPES:
        yield f"{where}: port {port.name!r} has unknown dtype {port.dtype!r}{nearest(port.dtype, _DTYPES)}"


def _partition_faults(graph: Graph) -> Iterator[str]:
    used: set[str] = set()
    for partition in graph.partitions:
        if not partition.walks:
            yield f"partition {partition.name!r} has no walk"
        for walk in partition.walks:
            used.add(walk)
            if walk not in graph.walks:
                yield f"partition {partition.name!r}: unknown walk {walk!r}{nearest(walk, graph.walks)}"
    for walk in graph.walks:
        if walk not in used:
            yield f"walk {walk!r} belongs to no partition"
    if not graph.partitions:
        yield "no partition: nothing would ever run"
    called = {call.node for walk in graph.walks.values() for call in calls_of(walk)}
    for node in graph.nodes:
        if node.name not in called:
            yield f"node {node.name!r} is never called"


def _stream_faults(graph: Graph) -> Iterator[str]:
    ends = {p.name for p in graph.partitions} | {CLIENT}
    emitted, pulled = _stream_uses(graph)
    for stream in graph.streams:
        where = f"stream {stream.name!r}"
        for role, end in (("source", stream.source), ("target", stream.target)):
            if end not in ends:
                yield f"{where}: unknown {role} {end!r}{nearest(end, ends)}"
        if stream.source == stream.target == CLIENT:
            yield f"{where} goes from the client to the client"
        if stream.source != CLIENT and stream.source not in emitted.get(stream.name, set()):
            yield f"{where}: no call of its source partition {stream.source!r} emits to it"
        if stream.target != CLIENT and stream.target not in pulled.get(stream.name, set()):
            yield f"{where}: no call of its target partition {stream.target!r} pulls from it"
        for uses, end, verb in ((emitted, stream.source, "emits to"), (pulled, stream.target, "pulls from")):
            for partition in uses.get(stream.name, set()) - {end}:
                yield f"{where}: partition {partition!r} {verb} it, only {end!r} may"
        yield from _dtype_faults(where, stream.port)
        yield from stream_faults(where, graph, stream, list(_emitting(graph, stream.name)))


def _emitting(graph: Graph, stream: str) -> Iterator[tuple[Call, Entry]]:
    """The calls that emit to *stream*, as far as their nodes exist."""
    entries = {(node.name, entry.name): entry for node in graph.nodes for entry in node.entries}
    for walk in graph.walks.values():
        for call in calls_of(walk):
            if stream in call.emit.values() and (call.node, call.entry) in entries:
                yield call, entries[call.node, call.entry]


def _stream_uses(graph: Graph) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    emitted: dict[str, set[str]] = {}
    pulled: dict[str, set[str]] = {}
    for partition in graph.partitions:
        for walk in partition.walks:
            for call in calls_of(graph.walks[walk]) if walk in graph.walks else ():
                for stream in call.emit.values():
                    emitted.setdefault(stream, set()).add(partition.name)
                for source in call.inputs.values():
                    if isinstance(source, Pull):
                        pulled.setdefault(source.stream, set()).add(partition.name)
            for loop in loops_of(graph.walks[walk]) if walk in graph.walks else ():
                if loop.progress is not None:
                    emitted.setdefault(loop.progress, set()).add(partition.name)
    return emitted, pulled


def _reference_faults(graph: Graph) -> Iterator[str]:
    nodes = {n.name: {e.name: e for e in n.entries} for n in graph.nodes}
    streams = {s.name for s in graph.streams}
    for name, walk in graph.walks.items():
        for loop in loops_of(walk):
            if loop.progress is not None:
                yield from _progress_faults(f"walk {name!r}: a loop", graph, loop.progress)
        for call in calls_of(walk):
            where = f"walk {name!r}: call of {call.node!r}"
            if call.node not in nodes:
                yield f"{where}: unknown node{nearest(call.node, nodes)}"
                continue
            entry = nodes[call.node].get(call.entry)
            if entry is None:
                yield f"{where}: unknown entry {call.entry!r}{nearest(call.entry, nodes[call.node])}"
                continue
            yield from _port_faults(where, call, entry, streams)


def _progress_faults(where: str, graph: Graph, name: str) -> Iterator[str]:
    stream = next((s for s in graph.streams if s.name == name), None)
    if stream is None:
        yield f"{where}: tells its progress to unknown stream {name!r}{nearest(name, (s.name for s in graph.streams))}"
    elif stream.target != CLIENT or (stream.port.dtype, stream.port.shape) != ("int64", (2,)):
        yield f"{where}: progress goes to the client as int64 (2,), stream {name!r} goes to {stream.target!r} as " + (
            f"{stream.port.dtype} {stream.port.shape}"
        )


def _port_faults(where: str, call: Call, entry: Entry, streams: set[str]) -> Iterator[str]:
    inputs, outputs = {p.name: p for p in entry.inputs}, {p.name for p in entry.outputs}
    for port in call.inputs:
        if port not in inputs:
            yield f"{where}: unknown input port {port!r}{nearest(port, inputs)}"
    for wanted in inputs.values():
        if wanted.name not in call.inputs and not wanted.optional:
            yield f"{where}: input port {wanted.name!r} has no source"
    for port in (*call.outputs, *call.emit):
        if port not in outputs:
            yield f"{where}: unknown output port {port!r}{nearest(port, outputs)}"
    for stream in call.emit.values():
        if stream not in streams:
            yield f"{where}: emits to unknown stream {stream!r}{nearest(stream, streams)}"
    pulls = {s.stream for s in call.inputs.values() if isinstance(s, Pull)}
    for source in call.inputs.values():
        if isinstance(source, Pull) and source.stream not in streams:
            yield f"{where}: pulls from unknown stream {source.stream!r}{nearest(source.stream, streams)}"
        if isinstance(source, Left | Ahead | Offset | AtEnd) and source.stream not in pulls:
            yield f"{where}: {type(source).__name__}({source.stream!r}) without a pull of that stream in the same call"


class _Flow:
    """Follows values through one walk: what is surely there before each call, and whether the types fit."""

    def __init__(self, graph: Graph, resources: Mapping[str, ResourceSpec], name: str):
        self.graph, self.resources, self.name = graph, resources, name
        self.producers: dict[str, list[Port]] = {p.name: [p] for p in graph.inputs}
        self.elsewhere = {p.name for p in graph.inputs}  # made by the request or by another walk
        for other, walk in graph.walks.items():
            for call in calls_of(walk):
                entry = graph.node(call.node).entry(call.entry)
                ports = {p.name: p for p in entry.outputs}
                for port, value in call.outputs.items():
                    self.producers.setdefault(value, []).append(ports[port])
                    if other != name:
                        self.elsewhere.add(value)

    def check(self, walk: Walk) -> Iterator[str]:
        yield from self._visit(walk, set(), [], False)

    def _visit(self, walk: Walk, have: set[str], loops: list[Loop], in_par: bool) -> Iterator[str]:
        if isinstance(walk, Call):
            yield from self._call(walk, have, loops, in_par)
            have.update(walk.outputs.values())
        elif isinstance(walk, Seq):
            for part in walk.parts:
                yield from self._visit(part, have, loops, in_par)
        elif isinstance(walk, Par):
            yield from self._par(walk, have, loops)
        elif isinstance(walk, Draft):
            yield from self._draft(walk)
            yield from self._visit(walk.body, have, loops, in_par)
        else:
            yield from self._loop(walk, have, loops)

    def _par(self, walk: Par, have: set[str], loops: list[Loop]) -> Iterator[str]:
        made: set[str] = set()
        held: dict[tuple[str, str], int] = {}
        written: dict[str, int] = {}
        for number, part in enumerate(walk.parts):
            branch = set(have)
            yield from self._visit(part, branch, loops, True)
            made |= branch
            for value in {value for call in calls_of(part) for value in call.outputs.values()}:
                if written.setdefault(value, number) != number:
                    yield f"walk {self.name!r}: two branches of a Par write {value!r}: which one stays is chance"
            keys = {
                (resource, call.context)
                for call in calls_of(part)
                for resource in self.graph.node(call.node).entry(call.entry).resources
            }
            for key in keys:
                if held.setdefault(key, number) != number:
                    yield (
                        f"walk {self.name!r}: two branches of a Par use resource {key[0]!r} in context {key[1]!r}; "
                        "give them contexts of their own"
                    )
        have |= made

    def _draft(self, draft: Draft) -> Iterator[str]:
        where = f"walk {self.name!r}: a draft"
        entries = [self.graph.node(call.node).entry(call.entry) for call in calls_of(draft.body)]
        for name in draft.resources:
            spec = self.resources.get(name)
            if spec is None:
                yield f"{where} takes back unknown resource {name!r}{nearest(name, self.resources)}"
            elif not spec.rewinds:
                yield f"{where} takes back resource {name!r}, which a {spec.kind} cannot"
            elif not any(name in entry.resources for entry in entries):
                yield f"{where} takes back resource {name!r}, which none of its calls uses"
            for entry in entries:
                if name in entry.resources and entry.prefix:
                    yield f"{where} calls entry {entry.name!r}, whose prompts others may share: it cannot take it back"

    def _loop(self, loop: Loop, have: set[str], loops: list[Loop]) -> Iterator[str]:
        where = f"walk {self.name!r}: a loop"
        if not loop.stops:
            yield f"{where} has no end"
        made = {value for call in calls_of(loop.body) for value in call.outputs.values()}
        pulled = {s.stream for c in calls_of(loop.body) for s in c.inputs.values() if isinstance(s, Pull)}
        for stop in loop.stops:
            if isinstance(stop, TokenStop):
                if stop.value not in have | self.elsewhere:
                    yield f"{where} stops on {stop.value!r}, which nothing produces before it"
                if stop.value not in made:
                    yield f"{where} stops on {stop.value!r}, which its body never changes: it would not end"
                if getattr(self.resources.get(stop.sampler), "kind", "") != "sampler":
                    yield f"{where} stops by sampler {stop.sampler!r}, which is no sampler resource"
            elif isinstance(stop, WhenTrue) and stop.value not in made:
                yield f"{where} ends when {stop.value!r} is true, which its body never produces"
            elif isinstance(stop, EndOf) and stop.stream not in pulled:
                yield f"{where} ends with stream {stop.stream!r}, which its body never pulls"
        yield from self._visit(loop.body, have, [*loops, loop], False)

    def _call(self, call: Call, have: set[str], loops: list[Loop], in_par: bool) -> Iterator[str]:
        where = f"walk {self.name!r}: call of {call.node!r}"
        ports = {p.name: p for p in self.graph.node(call.node).entry(call.entry).inputs}
        for name, source in call.inputs.items():
            port = ports[name]
            if isinstance(source, str):
                if source not in have | self.elsewhere:
                    if not port.optional:
                        late = " before this call" if source in self.producers else ""
                        yield f"{where}: nothing produces {source!r}{late} (input port {name!r})"
                    continue
                for producer in self.producers[source]:
                    yield from _type_faults(f"{where}: {source!r} into {name!r}", producer, port)
            elif isinstance(source, _Number) and (port.shape or port.layout != "stacked"):
                yield (
                    f"{where}: {type(source).__name__} is one number a row, input port {name!r} is declared "
                    f"{port.layout} {port.shape}: declare it Port({name!r}, {port.dtype!r}, (), 'stacked')"
                )
            if isinstance(source, Index) and source.depth >= len(loops):
                yield f"{where}: Index({source.depth}) for port {name!r} but only {len(loops)} loop(s) around it"
            elif isinstance(source, Pull) and source.at_end == "stop" and (not loops or in_par):
                yield f"{where}: Pull({source.stream!r}) that stops a loop must stand in one, outside of any Par in it"


def _type_faults(where: str, producer: Port, port: Port) -> Iterator[str]:
    if producer.dtype != port.dtype and not {producer.dtype, port.dtype} <= _FLOATS:
        yield f"{where}: {producer.dtype} does not fit {port.dtype}"
    one_item = port.layout == "packed" and producer.layout != "packed" and len(producer.shape) == len(port.shape) - 1
    if len(producer.shape) != len(port.shape) and not one_item:
        yield f"{where}: shape {producer.shape} does not fit {port.shape}"
        return
    tail = port.shape[1:] if one_item else port.shape
    for a, b in zip(producer.shape, tail, strict=True):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            yield f"{where}: shape {producer.shape} does not fit {port.shape}"
            return
