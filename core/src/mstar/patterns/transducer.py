"""Transducer (RNN-T, TDT): an encoder, then a predictor that walks along its frames and writes tokens on the way.

::

    source → encoder → frames → decoder ⟲ until done → "text"

The predictor's state and its place among the frames live in a state slot. One call of the decoder makes many steps.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mstar.nn.model import Model
from mstar.spec.graph import (
    CLIENT,
    Call,
    Entry,
    Graph,
    Loop,
    NodeSpec,
    Param,
    Partition,
    Port,
    Seq,
    Source,
    Stream,
    WhenTrue,
)
from mstar.spec.resources import RaggedAttention, RecurrentState, ResourceSpec

__all__ = ["Transducer", "TransducerFacts"]


@dataclass(frozen=True)
class TransducerFacts:
    """What a family of this pattern states.

    :param source: the request's input, for instance features ``("F", 80)``. :param frames: what the encoder makes of
        it, packed. :param state: the decoder's state: name → (shape, dtype), starting as zeros.
    :param attention: the encoder's attention, if it attends within its input: resource ``encoder_attention``.
    :param knobs: request parameters that the decoder takes, as stacked ports of their names.
    """

    source: Port
    frames: Port
    state: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    attention: RaggedAttention | None = None
    knobs: tuple[Port, ...] = ()


class Transducer(Model):
    """Graph and resources of a transducer. A family adds :meth:`facts`, the two modules in :meth:`build` and its
    weights.

    *Nodes.* ``encoder.forward(step, SOURCE) -> {FRAMES}``. ``decoder.forward(step, FRAMES, KNOBS…) -> {"tokens",
    "done"}``: frames come as a list with one tensor a row; ``tokens`` packed (a row may have none), ``done`` bool
    ``[rows]``; view ``state`` holds what the facts name.

    *A request* brings SOURCE.
    """

    @abc.abstractmethod
    def facts(self) -> TransducerFacts: ...

    def graph(self) -> Graph:
        facts = self.facts()
        source, frames = facts.source, facts.frames
        encoder = Entry(
            inputs=(source,), outputs=(frames,), resources=("encoder_attention",) if facts.attention is not None else ()
        )
        decoder = Entry(
            inputs=(replace(frames, layout="list"), *facts.knobs),
            outputs=(Port("tokens", "int64", ("U",)), Port("done", "bool", (), "stacked")),
            resources=("state",),
        )
        read = Call("encoder", inputs={source.name: source.name}, outputs={frames.name: "encoded"})
        inputs: dict[str, Source] = {frames.name: "encoded", **{port.name: Param(port.name) for port in facts.knobs}}
        write = Call("decoder", inputs=inputs, outputs={"done": "done"}, emit={"tokens": "text"})
        return Graph(
            nodes=(NodeSpec("encoder", (encoder,)), NodeSpec("decoder", (decoder,))),
            walks={"transcribe": Seq(read, Loop(write, WhenTrue("done")))},
            partitions=(Partition("main", ("transcribe",)),),
            streams=(Stream("text", "main", CLIENT, Port("token", "int64", (), "stacked"), "tokens"),),
            inputs=(source,),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        facts = self.facts()
        found: dict[str, ResourceSpec] = {"state": RecurrentState(facts.state)}
        if facts.attention is not None:
            found["encoder_attention"] = facts.attention
        return found
