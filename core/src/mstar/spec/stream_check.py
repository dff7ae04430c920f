"""What is wrong with how a stream cuts, filters and hands on its items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mstar.spec.errors import nearest
from mstar.spec.graph import CLIENT, Call, Entry, Fixed, Fresh, Graph, Pull, Stream, Whole

__all__ = ["stream_faults"]

Emitting = Sequence[tuple[Call, Entry]]


def stream_faults(where: str, graph: Graph, stream: Stream, emitting: Emitting) -> Iterator[str]:
    """:param where: names the stream in the faults. :param emitting: the calls that write it."""
    yield from _chunk_faults(where, stream)
    yield from _code_faults(where, stream, emitting)
    if stream.primed is not None and stream.primed not in (inputs := [p.name for p in graph.inputs]):
        yield f"{where}: is primed with {stream.primed!r}, which is no input{nearest(stream.primed, inputs)}"
    if stream.fresh is not None:
        yield from _fresh_faults(where, graph, stream, stream.fresh, emitting)


def _chunk_faults(where: str, stream: Stream) -> Iterator[str]:
    chunk = stream.chunk
    if isinstance(chunk, Whole):
        if stream.capacity < 1:
            yield f"{where}: capacity {stream.capacity} holds nothing"
        return
    sizes = (chunk.size,) if isinstance(chunk, Fixed) else chunk.sizes
    if not sizes or min(sizes) < 1 or chunk.left < 0:
        yield f"{where}: chunks hold at least one item, and a context of zero or more: {chunk}"
    elif chunk.ahead < 0 or chunk.unit < 1 or min(chunk.padded, default=1) < 1:
        yield f"{where}: look-ahead is zero or more; a unit, and what chunks are padded to, at least one: {chunk}"
    elif stream.capacity < (most := (max(sizes) + chunk.ahead) * chunk.unit):
        ahead = ", look-ahead included" if chunk.ahead else ""
        yield f"{where}: capacity {stream.capacity} is below its largest chunk of {most} items{ahead}"


def _code_faults(where: str, stream: Stream, emitting: Emitting) -> Iterator[str]:
    codes = stream.codes
    if codes is None:
        return
    if CLIENT in (stream.source, stream.target):
        yield f"{where}: only streams between partitions take codes"
    if not codes.ranges or any(first >= behind for first, behind in codes.ranges):
        yield f"{where}: each position of a frame needs ids that are codes: {codes.ranges}"
    for call, entry in emitting:
        outputs = {p.name for p in entry.outputs}
        if codes.token not in outputs:
            yield (
                f"{where}: call of {call.node!r} emits codes without a token {codes.token!r}"
                f"{nearest(codes.token, outputs)}"
            )


def _fresh_faults(where: str, graph: Graph, stream: Stream, fresh: Fresh, emitting: Emitting) -> Iterator[str]:
    pulled = next((s for s in graph.streams if s.name == fresh.pull), None)
    if stream.codes is not None:
        yield f"{where}: takes codes one by one, and is not cut to what is new"
    if stream.target != CLIENT and fresh.overlap:
        yield f"{where}: only the client can blend an overlap, and {stream.target!r} reads this"
    if pulled is None:
        yield f"{where}: is cut by unknown stream {fresh.pull!r}{nearest(fresh.pull, (s.name for s in graph.streams))}"
        return
    if fresh.per_unit < 1:
        yield f"{where}: a unit becomes at least one item, not {fresh.per_unit}"
    most = 0 if isinstance(pulled.chunk, Whole) or not pulled.chunk.ahead else fresh.per_unit
    if not 0 <= fresh.overlap <= most:
        yield f"{where}: an overlap of {fresh.overlap} items; with the look-ahead of {fresh.pull!r} at most {most}"
    for call, _ in emitting:
        if not any(isinstance(s, Pull) and s.stream == fresh.pull for s in call.inputs.values()):
            yield f"{where}: call of {call.node!r} emits to it without a pull of {fresh.pull!r}"
