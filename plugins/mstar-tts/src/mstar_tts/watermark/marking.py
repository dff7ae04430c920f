"""Marks on all that a model says: a node behind whatever makes its sound.

:func:`marked` puts it there. The model's stream of sound to the client becomes one to a partition of its own, which
reads it in pieces, adds their marks and sends them on; so it does not matter how the sound was made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mstar.nn.model import BuildContext, Model, Outcome, Run
from mstar.nn.node import Node, Step
from mstar.spec.errors import SetupError
from mstar.spec.graph import (
    CLIENT,
    Call,
    EndOf,
    Entry,
    Fixed,
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
from mstar.spec.resources import RecurrentState, ResourceSpec
from mstar_tts.codec_blocks import Carry
from mstar_tts.seanet_config import SeanetConfig
from mstar_tts.watermark.audioseal import HOP, audioseal_sizes, audioseal_weights
from mstar_tts.watermark.audioseal import Generator as AudioSeal
from mstar_tts.watermark.options import AudioWatermark, message_bits

__all__ = ["Marker", "marked"]

_NODE, _UNMARKED, _ENDS = "watermark", "unmarked", "ends"
_SAMPLES = Port("samples", "float32", ("S",), "stacked")
_MOST = 1 << 22
"""Samples of a sound that is marked as a whole: three minutes at 24 kHz."""

Pieces = Callable[[Any], Fixed | Ramp | Whole]
"""From a model to the samples of the pieces that are marked at once."""

_Class = TypeVar("_Class", bound=type[Model])


class Marker(Node):
    """Adds its mark to sound; float32 always.

    :param message: the mark's bits. :param strength: what it is multiplied by. :param sizes: the generator's.
    """

    def __init__(self, message: Sequence[int], strength: float, sizes: SeanetConfig):
        super().__init__()
        self.strength = strength
        self.generator = AudioSeal(message, sizes)

    def forward(self, step: Step, samples: Tensor) -> dict[str, Tensor]:
        """*samples* ``[rows, S]`` in -1…1, which follow those of the steps before. Returns `marked`, the same with the
        mark."""
        view = step[_NODE]
        ends = view.read(_ENDS)
        carry = Carry(ends)
        mark = self.generator(samples, carry)
        view.write(_ENDS, carry.state(ends))
        return {"marked": (samples + self.strength * mark).clamp(-1, 1)}


def marked(pieces: Pieces, stream: str = "audio") -> Callable[[_Class], _Class]:
    """A class decorator for models whose options are
    :class:`~mstar_tts.watermark.options.WatermarkOptions`: where these enable it, what the model sends on *stream* is
    marked. Nothing else about the model changes.

    :param pieces: whole pieces are multiples of :data:`~mstar_tts.watermark.audioseal.HOP` samples.
    """

    def decorate(kind: _Class) -> _Class:
        made = type(kind.__name__, (_Marked, kind), {"pieces": staticmethod(pieces), "sound": stream})
        made.__module__, made.__qualname__, made.__doc__ = kind.__module__, kind.__qualname__, kind.__doc__
        return cast(_Class, made)

    return decorate


class _Marked(Model):
    """What :func:`marked` puts before a model."""

    pieces: Pieces
    sound: str

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.watermark: AudioWatermark = context.options.audio_watermark
        if self.watermark.enabled:
            self._file = _generator_file(self.watermark)

    def graph(self) -> Graph:
        graph = super().graph()  # type: ignore[safe-super]
        return _with_mark(graph, self.sound, type(self).pieces(self)) if self.watermark.enabled else graph

    def resources(self) -> Mapping[str, ResourceSpec]:
        resources = super().resources()
        if not self.watermark.enabled:
            return resources
        with torch.device("meta"):
            size = AudioSeal(message_bits(0), audioseal_sizes(self._file)).carried
        return {**resources, _NODE: RecurrentState({_ENDS: ((size,), "float32")})}

    def build(self, node: str) -> Node:
        if not self._mine(node):
            return super().build(node)  # type: ignore[safe-super]
        module = Marker(message_bits(self.watermark.message), self.watermark.alpha, audioseal_sizes(self._file))
        audioseal_weights(module.generator, self._file)
        return module

    def weights(self, node: str) -> Any:
        if not self._mine(node):
            return super().weights(node)
        with torch.device("meta"):
            module = self.build(node)
        assert isinstance(module, Marker)
        found = audioseal_weights(module.generator, self._file)
        places = tuple(replace(place, target=f"generator.{place.target}") for place in found.placements)
        return replace(found, placements=places)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Marker):
            module.generator.settle()
        else:
            super().loaded(node, module)

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if self._mine(partition):
            yield Run(_NODE)
        else:
            yield from super().route(partition, request)

    def _mine(self, name: str) -> bool:
        return self.watermark.enabled and name == _NODE


def _generator_file(option: AudioWatermark) -> Path:
    if option.generator is None:
        raise SetupError(
            "audio_watermark.enabled needs audio_watermark.generator: the file generator_streaming.pth of "
            "https://huggingface.co/facebook/audioseal, which "
            "'hf download facebook/audioseal generator_streaming.pth --local-dir DIR' fetches"
        )
    file = Path(option.generator).expanduser()
    if not file.exists():
        raise SetupError(f"audio_watermark.generator: there is no {option.generator!r}")
    return file


def _with_mark(graph: Graph, sound: str, pieces: Fixed | Ramp | Whole) -> Graph:
    """*graph* with a partition that marks what goes to the client on stream *sound*."""
    sizes = () if isinstance(pieces, Whole) else pieces.sizes if isinstance(pieces, Ramp) else (pieces.size,)
    if any(size % HOP for size in sizes):
        raise SetupError(f"pieces of {sizes} samples cannot be marked one by one; multiples of {HOP} can")
    before = graph.stream(sound)
    sample = Port("sample", "float32", (), "stacked")
    unmarked = replace(
        before, name=_UNMARKED, target=_NODE, port=sample, modality="state", chunk=pieces, capacity=_MOST,
        seconds_per_item=None,
    )  # fmt: skip
    after = Stream(sound, _NODE, CLIENT, sample, before.modality, seconds_per_item=before.seconds_per_item)
    entry = Entry(
        inputs=(_SAMPLES,),
        outputs=(replace(_SAMPLES, name="marked"),),
        resources=(_NODE,),
        graph_sizes=tuple({"S": size} for size in sizes),
    )
    mark = Call(_NODE, inputs={"samples": Pull(_UNMARKED)}, emit={"marked": sound})
    walks = {name: _redirected(walk, sound) for name, walk in graph.walks.items()}
    return replace(
        graph,
        nodes=(*graph.nodes, NodeSpec(_NODE, (entry,), graph_rows=(1, 2, 4, 8, 16, 32))),
        walks={**walks, _NODE: Loop(mark, EndOf(_UNMARKED))},
        partitions=(*graph.partitions, Partition(_NODE, (_NODE,))),
        streams=(*(unmarked if stream is before else stream for stream in graph.streams), after),
    )


def _redirected(walk: Walk, sound: str) -> Walk:
    if isinstance(walk, Call):
        emit = {port: _UNMARKED if stream == sound else stream for port, stream in walk.emit.items()}
        return replace(walk, emit=emit)
    if isinstance(walk, Seq | Par):
        return type(walk)(*(_redirected(part, sound) for part in walk.parts))
    return replace(walk, body=_redirected(walk.body, sound))
