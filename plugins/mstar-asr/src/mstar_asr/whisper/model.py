"""Whisper's worker side: what is called when, and what a request holds.

::

    samples → encoder → decoder.prime      (keys and values of the window, written once)
    sot → decoder.detect → "language"      (if the prompt leaves it open)
    prompt → decoder.begin → token, "no_speech"
    token → decoder.forward → token ⟲ "text"
    decoder.align → "aligned", "alignment" (if words are wanted)

:mod:`mstar_asr.whisper.request` says what a request brings and what comes out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace

import torch

from mstar.nn.config import read_config
from mstar.nn.model import BuildContext, Demand, Model, Outcome, Run
from mstar.nn.node import Node
from mstar.patterns.shapes import DecoderShape, answer_tokens
from mstar.spec.errors import WeightsError
from mstar.spec.graph import (
    CLIENT,
    Call,
    Const,
    Entry,
    Graph,
    Loop,
    NodeSpec,
    Partition,
    Port,
    Seq,
    Stream,
    TokenStop,
    Walk,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import CrossKV, Positions, RaggedAttention, RecurrentState, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_asr.whisper.config import WhisperConfig
from mstar_asr.whisper.decoder import Decoder
from mstar_asr.whisper.encoder import Encoder
from mstar_asr.whisper.request import CONTEXT, DETECT, WINDOW
from mstar_asr.whisper.rules import FACTS
from mstar_asr.whisper.tokens import WhisperTokens

__all__ = ["Whisper"]

_PREFIXES = {"encoder": "model.encoder.", "decoder": "model.decoder."}
_ROWS = {"cpu": 1, "cuda": 16}
"""Windows that are encoded in one step. One is work enough for any CPU, and the first may be written while others are
heard; on a GPU more than so many gain nothing. Each takes up to 60 MB of activations."""

# Inputs wait in the host's memory: 2 MB each, which a step takes to the device for all of its rows at once.
_SAMPLES = Port("samples", "float32", (WINDOW + 2 * CONTEXT,), "stacked", host=True)
_FRAMES = Port("frames", "int64", (1,), "stacked", host=True)
_LOUDEST = Port("loudest", "float32", (1,), "stacked", host=True)
_PROMPT = Port("prompt", "int64", ("T",), host=True)
_LANGUAGE = Port("language", "int64", (), "stacked", optional=True)
_RULES = Port("rules", "int64", (3,), "stacked", host=True)
_TOKEN = Port("token", "int64", (), "stacked")
_TOLD = Port("told", "float32", (2,), "stacked")
_NO_SPEECH = Port("no_speech", "float32", (), "stacked")


class Whisper(Model):
    """All sizes of Whisper, multilingual or English-only; everything about one is in its checkpoint."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.config = WhisperConfig.from_hf(read_config(context.weights))
        assert context.weights is not None
        self.tokens = WhisperTokens.read(context.weights)
        for layer, head in self.tokens.alignment_heads:
            if layer >= self.config.decoder_layers or head >= self.config.decoder_heads:
                raise WeightsError(
                    f"generation_config.json: alignment_heads has head {head} of layer {layer}; the decoder has "
                    f"{self.config.decoder_layers} layers of {self.config.decoder_heads} heads"
                )

    # --- graph --------------------------------------------------------------------------------------------------------
    def graph(self) -> Graph:
        rows = _ROWS.get(self.context.device.type, _ROWS["cuda"])
        memory = Port("memory", "model", (self.config.SOURCE_POSITIONS, self.config.hidden), "stacked")
        encoder = NodeSpec("encoder", (Entry(inputs=(_SAMPLES, _FRAMES, _LOUDEST), outputs=(memory,)),), rows)
        aligned, probability = Port("aligned", "int64", ("W",)), Port("probability", "float32", ("P",))
        alignment = Port("alignment", "float32", ("W", self.config.SOURCE_POSITIONS))
        streams = [
            Stream("text", "main", CLIENT, _TOKEN, "tokens"),
            Stream("no_speech", "main", CLIENT, _NO_SPEECH, "state"),
            Stream("aligned", "main", CLIENT, replace(aligned, shape=(), layout="stacked"), "state"),
            Stream("aligned_probability", "main", CLIENT, replace(probability, shape=(), layout="stacked"), "state"),
            Stream(
                "alignment", "main", CLIENT, replace(alignment, shape=alignment.shape[1:], layout="stacked"), "state"
            ),
        ]
        walks = {"listen": self._listen(), "write": self._write(), "align": self._align()}
        if self.tokens.multilingual:
            streams.append(Stream("language", "main", CLIENT, _TOLD, "state"))
            walks["detect"] = self._detect()
        return Graph(
            nodes=(encoder, NodeSpec("decoder", self._decoder_entries(memory, (aligned, probability, alignment)))),
            walks=walks,
            partitions=(Partition("main", tuple(walks)),),
            streams=tuple(streams),
            inputs=(_SAMPLES, _FRAMES, _LOUDEST, _PROMPT, _RULES),
        )

    def _decoder_entries(self, memory: Port, found: tuple[Port, ...]) -> tuple[Entry, ...]:
        state = ("kv", "positions", "cross", "answer", "sampler")
        read = Port("ids", "int64", ("T",))
        return (
            Entry("prime", (memory,), resources=("cross",)),
            Entry(
                "detect",
                (Port("sot", "int64", (), "stacked"),),
                (replace(_LANGUAGE, optional=False), _TOLD),
                resources=("kv", "positions", "cross"),
                frozen=("kv", "positions"),
            ),
            Entry("begin", (read, _RULES, _LANGUAGE), (_TOKEN, _NO_SPEECH), resources=state),
            Entry("forward", (Port("ids", "int64", (), "stacked"),), (_TOKEN,), resources=state),
            Entry(
                "align",
                # a list, since the node reads on the host what was said: no graph of it is tried
                (_PROMPT, replace(_FRAMES, layout="list"), _RULES, _LANGUAGE),
                found,
                resources=("cross", "answer", "again"),
                frozen=("answer",),
            ),
        )

    @staticmethod
    def _listen() -> Walk:
        inputs = {port.name: port.name for port in (_SAMPLES, _FRAMES, _LOUDEST)}
        return Seq(
            Call("encoder", inputs=inputs, outputs={"memory": "memory"}),
            Call("decoder", "prime", {"memory": "memory"}),
        )

    def _detect(self) -> Walk:
        return Call(
            "decoder", "detect", {"sot": Const(self.tokens.sot)}, {"language": "language"}, {"told": "language"}
        )

    @staticmethod
    def _write() -> Walk:
        first = Call(
            "decoder",
            "begin",
            {
                "ids": "prompt",
                "rules": "rules",
                "language": "language",
            },
            {"token": "token"},
            {"token": "text", "no_speech": "no_speech"},
        )
        more = Call("decoder", "forward", {"ids": "token"}, {"token": "token"}, {"token": "text"})
        return Seq(first, Loop(more, TokenStop("token")))

    @staticmethod
    def _align() -> Walk:
        return Call(
            "decoder",
            "align",
            {"prompt": "prompt", "frames": "frames", "rules": "rules", "language": "language"},
            emit={"aligned": "aligned", "probability": "aligned_probability", "alignment": "alignment"},
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("listen")
        if DETECT in request.inputs["prompt"]:
            yield Run("detect")
        yield Run("write")
        if request.params["words"]:
            yield Run("align")

    # --- resources ----------------------------------------------------------------------------------------------------
    def resources(self) -> Mapping[str, ResourceSpec]:
        config = self.config
        heads, head_dim = config.decoder_heads, config.decoder_head_dim
        shape = DecoderShape(config.vocab, config.decoder_layers, heads, heads, head_dim, config.positions)
        return {
            # what a prompt becomes depends on the sound: there is nothing to share
            "kv": replace(shape.kv(), prefix_cache=False),
            "positions": Positions(),
            "cross": CrossKV(config.decoder_layers, heads, head_dim, heads, config.SOURCE_POSITIONS),
            "answer": RecurrentState({"facts": ((FACTS,), "int64"), "said": ((config.positions,), "int64")}),
            "sampler": shape.sampler(),
            "again": RaggedAttention(heads, heads, head_dim),
        }

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["prompt"]) + answer_tokens(request))

    # --- nodes --------------------------------------------------------------------------------------------------------
    def build(self, node: str) -> Node:
        return Encoder(self.config) if node == "encoder" else Decoder(self.config, self.tokens)

    def weights(self, node: str) -> WeightMap:
        with torch.device("meta"):
            return WeightMap.of_node(self.build(node), node, _PREFIXES, ignore=(r"proj_out\.weight",))
