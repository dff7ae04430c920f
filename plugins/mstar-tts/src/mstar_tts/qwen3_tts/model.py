"""Qwen3-TTS's graph: the talker writes frames, the codec turns them into sound while it goes on; clips are heard first.

::

    partition lm:     (clip → voice, frames) → prepare → rows → talker → token ⟲ talker ──codes──▶
    partition codec:  ──codes──▶ codec → samples ⟲ → "audio"

What is computed from a clip is kept on the host, by the clip's content (:mod:`mstar_tts.qwen3_tts.clips`): the route
runs the encoders only for what is not known, and puts the clip's frames into the prompt.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mstar.nn.config import read_config
from mstar.nn.model import BuildContext, Demand, Model, Outcome, Run
from mstar.nn.node import Node
from mstar.patterns.shapes import DecoderShape, answer_tokens
from mstar.spec.graph import (
    CLIENT,
    Call,
    Codes,
    EndOf,
    Entry,
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
    TokenStop,
    Walk,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, RecurrentState, ResourceSpec, Sampler
from mstar.weights.names import WeightMap
from mstar_tts.qwen3_tts.clips import Clips
from mstar_tts.qwen3_tts.codec import Codec, codec_entries, codec_state, codec_weights
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig, SpeakerConfig
from mstar_tts.qwen3_tts.codec_encoder import ReferenceEncoder, encoder_weights
from mstar_tts.qwen3_tts.config import SamplingDefaults, TTSConfig
from mstar_tts.qwen3_tts.prompt import fill
from mstar_tts.qwen3_tts.speaker_encoder import SpeakerEncoder, speaker_weights
from mstar_tts.qwen3_tts.talker import Talker, talker_weights
from mstar_tts.watermark.marking import marked

__all__ = ["CLIP", "Qwen3TTS"]

CLIP = "clip"
"""The request's parameter with the digest of its clip."""
_SIZES = (1, 3, 8, 16, 25)
_PADDED = (1, 3, 5, 8, 12, 16, 20, 25)
"""Frames that the last piece of an answer is filled up to, so that it too has one of a few sizes."""
_RAMP = Ramp(_SIZES, padded=_PADDED)
_ROWS = (1, 2, 4, 8, 16, 32)
"""Of the codec's captured steps."""


@marked(lambda model: model.pieces_of_sound())
class Qwen3TTS(Model):
    """All four keys. A request brings ``rows``; ``queue`` and ``prompt_length`` if its text streams or it has a voice
    of its own; and ``clip``, float32 ``[S]`` at the codec's rate, with its digest among the parameters."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.config = TTSConfig.read(context.weights)
        self.config.require(context.options.variant)
        assert context.weights is not None
        self.codec = CodecConfig.read(read_config(context.weights / FOLDER))
        self.options = context.options
        self.defaults = SamplingDefaults.read(context.weights)
        self.clones = self.config.variant == "base"
        self.clips = Clips(self.options.cached_clips if self.clones else 0)

    # --- graph --------------------------------------------------------------------------------------------------------
    def graph(self) -> Graph:
        width, groups = self.config.talker.hidden, self.config.groups
        rows, frame = Port("rows", "int64", ("T", 1 + groups)), Port("frame", "int64", (groups,), "stacked")
        length, voice = Port("prompt_length", "int64", (), "stacked"), Port("voice", "float32", (width,), "stacked")
        queue, clip = Port("queue", "int64", ("Q",)), Port("clip", "float32", ("S",))
        frames = Port("frames", "int64", ("R", groups))
        token = Port("token", "int64", (), "stacked")
        speak = Entry(
            inputs=(rows,),
            outputs=(token, frame, Port("next", "int64", (1 + groups,), "stacked")),
            chunk="rows",
            resources=("kv", "positions", "sampler", "subtalker", "text"),
        )
        prepare = Entry("prepare", (queue, length, *([voice] if self.clones else [])), resources=("text",))
        nodes = [NodeSpec("talker", (speak, prepare)), self._codec_node()]
        inputs = [rows, replace(queue, optional=True), replace(length, optional=True)]
        if self.clones:
            nodes.append(NodeSpec("speaker", (Entry(inputs=(clip,), outputs=(voice,)),)))
            nodes.append(NodeSpec("encoder", (Entry(inputs=(clip,), outputs=(frames,)),)))
            inputs += [replace(port, optional=True) for port in (clip, voice, replace(frames, name="reference"))]
        walks = self._walks()
        return Graph(
            nodes=tuple(nodes),
            walks=walks,
            partitions=(
                Partition("lm", tuple(name for name in walks if name != "decode")),
                Partition("codec", ("decode",)),
            ),
            streams=(
                Stream("codes", "lm", "codec", frame, chunk=_RAMP, codes=Codes(((0, self.codec.codebook_size),))),
                Stream(
                    "audio",
                    "codec",
                    CLIENT,
                    Port("sample", "float32", (), "stacked"),
                    "audio",
                    seconds_per_item=1 / self.codec.rate,
                    fresh=Fresh("codes", self.codec.samples_per_frame),
                ),
            ),
            inputs=tuple(inputs),
        )

    def pieces_of_sound(self) -> Ramp:
        """How the sound is cut: as the frames are, in samples."""
        each = self.codec.samples_per_frame
        return Ramp(tuple(n * each for n in _SIZES), padded=tuple(n * each for n in _PADDED))

    def _codec_node(self) -> NodeSpec:
        return NodeSpec("codec", codec_entries(self.codec, _PADDED), max(_ROWS), _ROWS)

    def _walks(self) -> dict[str, Walk]:
        first = Call(
            "talker", inputs={"rows": "rows"}, outputs={"token": "token", "next": "next"}, emit={"frame": "codes"}
        )
        sound = Call("codec", inputs={"codes": Pull("codes")}, emit={"samples": "audio"})
        keep = {"queue": "queue", "prompt_length": "prompt_length"}
        walks: dict[str, Walk] = {}
        if self.clones:
            walks["hear_voice"] = Call("speaker", inputs={"clip": "clip"}, outputs={"voice": "heard_voice"})
            walks["hear_frames"] = Call("encoder", inputs={"clip": "clip"}, outputs={"frames": "heard_frames"})
            prepare = Call("talker", "prepare", {**keep, "voice": "voice"})
            walks["prepare"] = prepare
            walks["prepare_clone"] = Par(prepare, Call("codec", "prime", {"frames": "reference"}))
        else:
            walks["prepare"] = Call("talker", "prepare", keep)
        walks["speak"] = Seq(first, Loop(replace(first, inputs={"rows": "next"}), TokenStop("token")))
        walks["decode"] = Loop(sound, EndOf("codes"))
        return walks

    # --- requests -----------------------------------------------------------------------------------------------------
    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if partition == "codec":
            yield Run("decode")
            return
        rows = np.asarray(request.inputs["rows"])
        values: dict[str, Any] = {}
        if CLIP in request.params:
            values["voice"] = yield from self._heard("voice", np.float32, request)
            if request.params["in_context"]:
                frames = yield from self._heard("frames", np.int64, request)
                values |= {"reference": frames, "rows": fill(rows, frames)}
        if "queue" in request.inputs:
            yield Run("prepare_clone" if "reference" in values else "prepare", values=values)
        yield Run("speak")

    def _heard(self, kind: str, dtype: Any, request: EngineRequest) -> Generator[Run, Outcome, Any]:
        clip = str(request.params[CLIP])
        known = self.clips.get(kind, clip)
        if known is None:
            outcome = yield Run(f"hear_{kind}", signals=(f"heard_{kind}",))
            known = np.asarray(outcome.signals[f"heard_{kind}"], dtype)
            self.clips.put(kind, clip, known)
        return known

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["rows"]) + answer_tokens(request))

    def resources(self) -> Mapping[str, ResourceSpec]:
        config, queue = self.config, self.options.max_streamed_text
        shape = DecoderShape.of(config.talker, self.options.max_tokens)
        text: dict[str, tuple[tuple[int, ...], str]] = {"queue": ((queue,), "int64"), "sizes": ((2,), "int64")}
        if self.clones:
            text["voice"] = ((config.talker.hidden,), "model")
        return {
            "kv": replace(shape.kv(), prefix_cache=False),
            "positions": Positions(),
            "sampler": replace(
                shape.sampler(prompt=None),
                penalised=self.defaults.repetition_penalty != 1,
                filtered=self.defaults.filters,
            ),
            "subtalker": Sampler(config.predictor.vocab, prompt=None, filtered=self.defaults.subtalker_filters),
            "text": RecurrentState(text),
            "codec": self._codec_state,
        }

    @cached_property
    def _codec_state(self) -> RecurrentState:
        """Its sizes are those of a codec that is built for the question."""
        return codec_state(self.codec, self.options.codec_dtype)

    # --- nodes --------------------------------------------------------------------------------------------------------
    def build(self, node: str) -> Node:
        if node == "talker":
            return Talker(self.config, self.options.max_streamed_text, voiced=self.clones)
        if node == "codec":
            return Codec(self.codec, getattr(torch, self.options.codec_dtype))
        if node == "encoder":
            return ReferenceEncoder(self.codec)
        return SpeakerEncoder(self._speaker())

    def _speaker(self) -> SpeakerConfig:
        return SpeakerConfig.read(read_config(self.context.weights)["speaker_encoder_config"])

    def weights(self, node: str) -> WeightMap:
        with torch.device("meta"):
            module = self.build(node)
        if isinstance(module, Talker):
            return talker_weights(module, ignore=(r"speaker_encoder\..*",) if self.clones else ())
        if isinstance(module, Codec):
            return codec_weights(module)
        if isinstance(module, ReferenceEncoder):
            return encoder_weights(module)
        assert isinstance(module, SpeakerEncoder)
        return speaker_weights(module)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Codec | ReferenceEncoder | SpeakerEncoder):
            module.settle()
