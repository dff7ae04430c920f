"""Marks on all that a model says: a node behind whatever makes its sound.

:func:`marked` puts it there. The model's stream of sound to the client becomes one to a partition of its own, which
reads it in pieces, adds their marks and sends them on; so it does not matter how the sound was made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from mstar.nn.model import BuildContext, Model, Outcome, Run
from mstar.nn.node import Node
from mstar.spec.graph import (
    CLIENT,
    Call,
    EndOf,
    Entry,
    Fixed,
    Fresh,
    Graph,
    Loop,
    NodeSpec,
    Par,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Stream,
    Walk,
    Whole,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import ResourceSpec
from mstar_tts.watermark.methods import NODE, method_of
from mstar_tts.watermark.options import AudioWatermark

__all__ = ["marked"]

_UNMARKED = "unmarked"
_SAMPLES = Port("samples", "float32", ("S",), "stacked")
_ROWS = (1, 2, 4, 8, 16, 32)
_MOST = 1 << 22
"""Samples of a sound that is marked as a whole: three minutes at 24 kHz."""

Pieces = Callable[[Any], Fixed | Ramp | Whole]
"""From a model to the samples of the pieces that are marked at once."""

_Class = TypeVar("_Class", bound=type[Model])


def marked(pieces: Pieces, rate: int = 24_000, stream: str = "audio") -> Callable[[_Class], _Class]:
    """A class decorator for models whose options are
    :class:`~mstar_tts.watermark.options.WatermarkOptions`: where these enable it, what the model sends on *stream* is
    marked. Nothing else about the model changes.

    :param pieces: multiples of :data:`~mstar_tts.watermark.audioseal.HOP` samples; no windows. :param rate: samples a
        second.
    """

    def decorate(kind: _Class) -> _Class:
        made = type(kind.__name__, (_Marked, kind), {"pieces": staticmethod(pieces), "sound": stream, "rate": rate})
        made.__module__, made.__qualname__, made.__doc__ = kind.__module__, kind.__qualname__, kind.__doc__
        return cast(_Class, made)

    return decorate


class _Marked(Model):
    """What :func:`marked` puts before a model."""

    pieces: Pieces
    sound: str
    rate: int

    def __init__(self, context: BuildContext):
        super().__init__(context)
        option: AudioWatermark = context.options.audio_watermark
        self._method = method_of(option, self.rate) if option.enabled else None

    def graph(self) -> Graph:
        graph = super().graph()  # type: ignore[safe-super]
        if self._method is None:
            return graph
        pieces = type(self).pieces(self)
        self._method.check(pieces)
        return _with_mark(graph, self.sound, pieces, tuple(self._method.resources()))

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {**super().resources(), **(self._method.resources() if self._method is not None else {})}

    def build(self, node: str) -> Node:
        if self._method is None or node != NODE:
            return super().build(node)  # type: ignore[safe-super]
        return self._method.node()

    def weights(self, node: str) -> Any:
        if self._method is None or node != NODE:
            return super().weights(node)
        with torch.device("meta"):
            return self._method.weights(self._method.node())

    def loaded(self, node: str, module: Node) -> None:
        if self._method is None or node != NODE:
            super().loaded(node, module)
        else:
            self._method.loaded(module)

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if self._method is None or partition != NODE:
            yield from super().route(partition, request)
        else:
            yield Run(NODE)


def _with_mark(graph: Graph, sound: str, pieces: Fixed | Ramp | Whole, resources: tuple[str, ...]) -> Graph:
    """*graph* with a partition that marks what goes to the client on stream *sound*."""
    sizes = () if isinstance(pieces, Whole) else pieces.sizes if isinstance(pieces, Ramp) else (pieces.size,)
    padded = () if isinstance(pieces, Whole) else pieces.padded
    before = graph.stream(sound)
    sample = Port("sample", "float32", (), "stacked")
    unmarked = replace(
        before, name=_UNMARKED, target=NODE, port=sample, modality="state", chunk=pieces, capacity=_MOST,
        seconds_per_item=None,
    )  # fmt: skip
    after = Stream(
        sound, NODE, CLIENT, sample, before.modality, seconds_per_item=before.seconds_per_item,
        fresh=Fresh(_UNMARKED, 1) if padded else None,
    )  # fmt: skip
    entry = Entry(
        inputs=(_SAMPLES,),
        outputs=(replace(_SAMPLES, name="marked"),),
        resources=resources,
        graph_sizes=tuple({"S": size} for size in dict.fromkeys((*sizes, *padded))),
    )
    mark = Call(NODE, inputs={"samples": Pull(_UNMARKED)}, emit={"marked": sound})
    walks = {name: _redirected(walk, sound) for name, walk in graph.walks.items()}
    return replace(
        graph,
        nodes=(*graph.nodes, NodeSpec(NODE, (entry,), max_rows=_ROWS[-1], graph_rows=_ROWS)),
        walks={**walks, NODE: Loop(mark, EndOf(_UNMARKED))},
        partitions=(*graph.partitions, Partition(NODE, (NODE,))),
        streams=(*(unmarked if stream is before else stream for stream in graph.streams), after),
    )


def _redirected(walk: Walk, sound: str) -> Walk:
    if isinstance(walk, Call):
        emit = {port: _UNMARKED if stream == sound else stream for port, stream in walk.emit.items()}
        return replace(walk, emit=emit)
    if isinstance(walk, Seq | Par):
        return type(walk)(*(_redirected(part, sound) for part in walk.parts))
    return replace(walk, body=_redirected(walk.body, sound))
