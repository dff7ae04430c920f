"""A graph as plain data with words a person reads: what ``mstar graph`` prints, draws and gives to programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mstar.spec.deployment import Deployment
from mstar.spec.graph import (
    Ahead,
    AtEnd,
    Call,
    Const,
    Draft,
    EndOf,
    Entry,
    Fixed,
    Graph,
    Index,
    Left,
    Loop,
    Offset,
    Param,
    Port,
    Pull,
    Ramp,
    Seq,
    Source,
    Stop,
    Stream,
    Times,
    TokenStop,
    Walk,
    WhenTrue,
    Whole,
)
from mstar.spec.placement import Seat, layout_of
from mstar.spec.resources import ResourceSpec

__all__ = ["graph_facts"]


def graph_facts(
    key: str, graph: Graph, resources: Mapping[str, ResourceSpec], deployment: Deployment
) -> dict[str, Any]:
    """Everything about *graph*, ready for JSON. Walks are trees of ``kind`` call, seq, par, loop and draft."""
    layout = layout_of(deployment.placement, [node.name for node in graph.nodes])
    return {
        "key": key,
        "replicas": deployment.replicas,
        "nodes": [
            {
                "name": node.name,
                "ranks": [rank for seat in layout.seats[node.name] for rank in seat.ranks],
                "seats": [_seat(seat) for seat in layout.seats[node.name]],
                "places": {
                    part: [_seat(seat) for seat in seats] for part, seats in layout.by_walk.get(node.name, {}).items()
                },
                "split": "contexts" if node.name in layout.by_context else "requests",
                "max_rows": node.max_rows,
                "entries": [_entry(entry) for entry in node.entries],
            }
            for node in graph.nodes
        ],
        "partitions": [{"name": p.name, "walks": list(p.walks)} for p in graph.partitions],
        "walks": {name: _walk(walk) for name, walk in graph.walks.items()},
        "streams": [_stream(stream) for stream in graph.streams],
        "inputs": [_port(port) for port in graph.inputs],
        "sessions": list(graph.sessions),
        "resources": {name: {"kind": spec.kind, **_fields(spec)} for name, spec in resources.items()},
    }


def _seat(seat: Seat) -> dict[str, Any]:
    return {"ranks": list(seat.ranks), "tp": seat.tp, "sp": seat.sp}


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "inputs": [_port(port) for port in entry.inputs],
        "outputs": [_port(port) for port in entry.outputs],
        "chunk": entry.chunk,
        "resources": list(entry.resources),
        "frozen": list(entry.frozen),
        "prefix": entry.prefix,
    }


def _port(port: Port) -> dict[str, Any]:
    return {**dataclasses.asdict(port), "shape": list(port.shape)}


def _stream(stream: Stream) -> dict[str, Any]:
    return {
        "name": stream.name,
        "source": stream.source,
        "target": stream.target,
        "modality": stream.modality,
        "item": _port(stream.port),
        "chunk": _chunk(stream.chunk),
        "capacity": stream.capacity,
        "seconds_per_item": stream.seconds_per_item,
    }


def _chunk(chunk: Fixed | Ramp | Whole) -> str:
    match chunk:
        case Fixed(size=size):
            text = "one by one" if size == 1 else f"{size} at a time"
        case Ramp(sizes=sizes):
            text = "in " + ", ".join(map(str, sizes)) + "…"
        case Whole():
            return "whole, at the end"
    if chunk.unit > 1:
        text = f"units of {chunk.unit} {text}"
    if chunk.left:
        text += f", after {chunk.left} of context"
    return f"{text}, with {chunk.ahead} of look-ahead" if chunk.ahead else text


def _fields(spec: ResourceSpec) -> dict[str, Any]:
    found = dataclasses.asdict(spec)
    if windows := found.get("windows"):  # one a layer: a long list that says little
        found["windows"] = {str(w or "full"): windows.count(w) for w in dict.fromkeys(windows)}
    return found


def _walk(walk: Walk) -> dict[str, Any]:
    if isinstance(walk, Call):
        return {
            "kind": "call",
            "node": walk.node,
            "entry": walk.entry,
            "context": walk.context,
            "inputs": {port: _source(source) for port, source in walk.inputs.items()},
            "outputs": dict(walk.outputs),
            "emit": dict(walk.emit),
        }
    if isinstance(walk, Loop):
        told = {} if walk.progress is None else {"progress": walk.progress}
        return {"kind": "loop", "until": [_stop(stop) for stop in walk.stops], **told, "body": _walk(walk.body)}
    if isinstance(walk, Draft):
        return {"kind": "draft", "resources": list(walk.resources), "body": _walk(walk.body)}
    return {"kind": "seq" if isinstance(walk, Seq) else "par", "parts": [_walk(part) for part in walk.parts]}


def _source(source: Source) -> str:
    match source:
        case str():
            return source
        case Param(name=name):
            return f"parameter {name}"
        case Index(depth=depth):
            return "number of the iteration" + (f", {depth} loops out" if depth else "")
        case Const(value=value):
            return f"constant {value}"
        case Pull(stream=stream, optional=optional):
            return f"next of stream {stream}" + (" (if there)" if optional else "")
        case Left(stream=stream):
            return f"context in the chunk of {stream}"
        case Ahead(stream=stream):
            return f"look-ahead and padding in the chunk of {stream}"
        case Offset(stream=stream):
            return f"items of {stream} before the chunk"
        case AtEnd(stream=stream):
            return f"whether {stream} has ended"


def _stop(stop: Stop) -> str:
    match stop:
        case TokenStop(value=value):
            return f"{value} is a stop token"
        case Times(count=Param(name=name)):
            return f"it has run {name} times (a parameter)"
        case Times(count=count):
            return f"it has run {count} times"
        case WhenTrue(value=value):
            return f"{value} is true"
        case EndOf(stream=stream):
            return f"stream {stream} has ended"
