"""LM → codec stream: a language model writes audio codes, a codec turns them into sound while it goes on writing.

::

    partition lm:     prompt → lm → token ⟲ lm ──codes──▶
    partition codec:  ──codes──▶ (windows with context and look-ahead) codec → samples ⟲ → "audio"

The two run side by side. The first window is short, so that sound starts early; later ones are long, so that the codec
costs little. Windows of one size share a step, whoever's they are, and are captured on a GPU.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mstar.nn.model import Demand, Model
from mstar.patterns.shapes import DecoderShape, answer_tokens
from mstar.spec.chunks import cuts
from mstar.spec.graph import (
    CLIENT,
    Call,
    Codes,
    EndOf,
    Entry,
    Fixed,
    Fresh,
    Graph,
    Left,
    Loop,
    NodeSpec,
    Offset,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Source,
    Stream,
    TokenStop,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, ResourceSpec

__all__ = ["LMCodec", "LMCodecFacts", "most_new", "window_sizes"]

_IDS = Port("ids", "int64", ("T",))
_TOKEN = Port("token", "int64", (), "stacked")


@dataclass(frozen=True)
class LMCodecFacts:
    """What a family of this pattern states.

    :param lm: the language model's sizes. :param rate: samples a second of the audio.
    :param samples: of one unit of *chunk*.
    :param chunk: how the codec's windows are cut; ``left`` is the context that its filters need before the new codes,
        ``ahead`` what they need behind them, ``unit`` the tokens of a frame where the LM writes its codes one by one.
    :param codebooks: codes of one frame. 1: the sampled token is the code. More: the LM also gives each frame.
    :param codes: the ids that are codes, by their position in a frame (:class:`~mstar.spec.graph.Codes`); what else is
        sampled makes no sound. Empty: whatever is sampled is a code.
    :param cut: the codec spares itself what is not new: it gets ``left`` and returns sound that begins with new units.
    :param noise: the codec draws noise: it gets ``key`` and ``offset``.
    :param penalised: all requests have a penalty (:class:`~mstar.spec.resources.Sampler`).
    :param overlap: samples that are blended where two windows meet; the renderer does it
        (:class:`mstar.processing.crossfade.Crossfade`).
    :param codec_rows: most rows of a step of the codec, and to how many captured ones are filled up
        (:class:`~mstar.spec.graph.NodeSpec`). Empty: the runner's own numbers.
    """

    lm: DecoderShape
    rate: int
    samples: int
    chunk: Ramp | Fixed
    codebooks: int = 1
    codes: tuple[tuple[int, int], ...] = ()
    noise: bool = False
    penalised: bool = False
    cut: bool = False
    overlap: int = 0
    codec_rows: tuple[int, ...] = ()


def window_sizes(chunk: Ramp | Fixed) -> list[int]:
    """Items of the windows that *chunk* cuts a stream into, each size once. Left out are those of streams that end
    within the first one, and those of any size in which a stream without look-ahead ends, unless they are padded."""
    found: dict[int, None] = {}
    for left, new, ahead in cuts(chunk, ends=bool(chunk.ahead or chunk.padded)):
        if left == chunk.left or ahead == chunk.ahead:
            window = left + new + ahead
            found[min((size for size in chunk.padded if size >= window), default=window) * chunk.unit] = None
    return list(found)


def most_new(chunk: Ramp | Fixed) -> dict[int, int]:
    """By the units of a window that *chunk* cuts: how many of them are new at most."""
    found: dict[int, int] = {}
    for left, new, ahead in cuts(chunk):
        found[left + new + ahead] = max(new, found.get(left + new + ahead, 0))
    return found


class LMCodec(Model):
    """Graph, resources and demand of a speaking language model. A family adds :meth:`facts`, the two modules in
    :meth:`build` and its weights.

    *Nodes.* ``lm.forward(step, ids) -> {"token": Sampled}`` uses views ``kv``, ``positions`` and ``sampler``; with
    several codebooks it also returns ``frame`` ``[rows, codebooks]``.
    ``codec.forward(step, codes) -> {"samples": float32 [rows, S]}``: *codes* int64 ``[rows, C]`` (or
    ``[rows, C, codebooks]``), windows of one size with their context and look-ahead. It returns the sound of all of
    them, of which the new part goes out; it may leave out samples at the head that are surely context. With ``noise``
    it also gets ``key`` int64 ``[rows]``, the request's, and ``offset`` int64 ``[rows]``, the codes before the window;
    with ``cut``, ``left`` int64 ``[rows]``, the codes of its context.

    *A request* brings ``prompt``, and with ``noise`` an int64 ``noise_key``.
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
        number = Port("key", "int64", (), "stacked")
        told: dict[str, Source] = {"left": Left("codes")} if facts.cut else {}
        if facts.noise:
            told |= {"key": "noise_key", "offset": Offset("codes")}
        codec = Entry(
            inputs=(Port("codes", "int64", ("C", *width), "stacked"), *(replace(number, name=name) for name in told)),
            outputs=(Port("samples", "float32", ("S",), "stacked"),),
            graph_sizes=tuple({"C": size} for size in window_sizes(facts.chunk)),
        )
        first = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "token"}, emit={outputs[-1].name: "codes"})
        sound = Call("codec", inputs={"codes": Pull("codes"), **told}, emit={"samples": "audio"})
        return Graph(
            nodes=(
                NodeSpec("lm", (lm,)),
                NodeSpec("codec", (codec,), max(facts.codec_rows, default=None), facts.codec_rows),
            ),
            walks={
                "speak": Seq(first, Loop(replace(first, inputs={"ids": "token"}), TokenStop("token"))),
                "decode": Loop(sound, EndOf("codes")),
            },
            partitions=(Partition("lm", ("speak",)), Partition("codec", ("decode",))),
            streams=(
                Stream(
                    "codes",
                    "lm",
                    "codec",
                    code,
                    chunk=facts.chunk,
                    codes=Codes(facts.codes) if facts.codes else None,
                ),
                Stream(
                    "audio",
                    "codec",
                    CLIENT,
                    Port("sample", "float32", (), "stacked"),
                    "audio",
                    seconds_per_item=1 / facts.rate,
                    fresh=Fresh("codes", facts.samples, facts.overlap, facts.cut),
                ),
            ),
            inputs=(Port("prompt", "int64", ("T",)), *((replace(number, name="noise_key"),) if facts.noise else ())),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        facts = self.facts()
        sampler = replace(facts.lm.sampler(), penalised=facts.penalised)
        return {"kv": facts.lm.kv(), "positions": Positions(), "sampler": sampler}

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["prompt"]) + answer_tokens(request))
