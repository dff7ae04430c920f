"""LM → codec stream: a language model writes audio codes, a codec turns them into sound while it goes on writing.

::

    partition lm:     prompt → lm → token ⟲ lm ──codes──▶
    partition codec:  ──codes──▶ (windows with left context) codec → samples ⟲ → "audio"

The two run side by side. The first window is short, so that sound starts early; later ones are long, so that the codec
costs little.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mstar.nn.model import Demand, Model
from mstar.patterns.shapes import DecoderShape, answer_tokens
from mstar.spec.graph import (
    CLIENT,
    Call,
    EndOf,
    Entry,
    Fixed,
    Graph,
    Left,
    Loop,
    NodeSpec,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Stream,
    TokenStop,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, ResourceSpec

__all__ = ["LMCodec", "LMCodecFacts"]

_IDS = Port("ids", "int64", ("T",))
_TOKEN = Port("token", "int64", (), "stacked")


@dataclass(frozen=True)
class LMCodecFacts:
    """What a family of this pattern states.

    :param lm: the language model's sizes. :param rate: samples a second of the audio.
    :param chunk: how the codec's windows are cut; ``left`` is the context that its filters need before the new codes.
    :param codebooks: codes of one frame. 1: the sampled token is the code. More: the LM also gives each frame.
    """

    lm: DecoderShape
    rate: int
    chunk: Ramp | Fixed
    codebooks: int = 1


class LMCodec(Model):
    """Graph, resources and demand of a speaking language model. A family adds :meth:`facts`, the two modules in
    :meth:`build` and its weights.

    *Nodes.* ``lm.forward(step, ids) -> {"token": Sampled}`` uses views ``kv``, ``positions`` and ``sampler``; with
    several codebooks it also returns ``frame`` ``[rows, codebooks]``.
    ``codec.forward(step, codes, left) -> {"samples": Packed}``: *codes* packed ``[N]`` (or ``[N, codebooks]``), of
    which each row's first ``left`` have been heard before. The token that ends the answer comes through the stream
    like any other, as its last item: the codec must leave it out.

    *A request* brings ``prompt``.
    """

    @abc.abstractmethod
    def facts(self) -> LMCodecFacts: ...

    def graph(self) -> Graph:
        facts = self.facts()
        width = () if facts.codebooks == 1 else (facts.codebooks,)
        code = Port("code", "int64", width, "stacked")
        outputs = (_TOKEN,) if facts.codebooks == 1 else (_TOKEN, replace(code, name="frame"))
        lm = Entry(
            inputs=(_IDS,),
            outputs=outputs,
            chunk="ids",
            resources=("kv", "positions", "sampler"),
            prefix=facts.codebooks == 1,  # with frames the KV depends on more than the ids
        )
        codec = Entry(
            inputs=(Port("codes", "int64", ("C", *width)), Port("left", "int64", (), "stacked")),
            outputs=(Port("samples", "float32", ("S",)),),
        )
        first = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "token"}, emit={outputs[-1].name: "codes"})
        sound = Call("codec", inputs={"codes": Pull("codes"), "left": Left("codes")}, emit={"samples": "audio"})
        return Graph(
            nodes=(NodeSpec("lm", (lm,)), NodeSpec("codec", (codec,))),
            walks={
                "speak": Seq(first, Loop(replace(first, inputs={"ids": "token"}), TokenStop("token"))),
                "decode": Loop(sound, EndOf("codes")),
            },
            partitions=(Partition("lm", ("speak",)), Partition("codec", ("decode",))),
            streams=(
                Stream("codes", "lm", "codec", code, chunk=facts.chunk),
                Stream(
                    "audio",
                    "codec",
                    CLIENT,
                    Port("sample", "float32", (), "stacked"),
                    "audio",
                    seconds_per_item=1 / facts.rate,
                ),
            ),
            inputs=(Port("prompt", "int64", ("T",)),),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        lm = self.facts().lm
        return {"kv": lm.kv(), "positions": Positions(), "sampler": lm.sampler()}

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["prompt"]) + answer_tokens(request))
