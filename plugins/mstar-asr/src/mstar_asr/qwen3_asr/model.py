"""Qwen3-ASR's worker side.

A whole clip is heard at once, as :class:`~mstar.patterns.encoder_lm.EncoderLM` does it::

    sound → encoder → media ┐
    prompt ─────────────────┴ llm.embed → llm → token ⟲ "text"

A live clip (stream ``audio``) is heard every few seconds. What comes before its sound is read once, and so is each
window of 8 s that is complete; the rest of the prompt and the answer are a draft each time::

    prompt → llm.words → llm.extend                      (once)
    "audio" → encoder.listen → media                     (each round: the window that is under way)
    media + rest → llm.join → llm → token ⟲ "text"       (a draft: taken back)
    media → llm.extend                                   (when the window is complete)
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mstar.nn.config import DecoderConfig, read_config
from mstar.nn.model import BuildContext, Demand, Outcome, Run
from mstar.nn.node import Node, Packed, Step
from mstar.patterns.encoder_lm import EncoderLM, EncoderLMFacts, EncoderLMNode
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.graph import (
    CLIENT,
    AtEnd,
    Call,
    Draft,
    Entry,
    Graph,
    Left,
    Loop,
    Port,
    Pull,
    Ramp,
    Seq,
    Source,
    Stream,
    Times,
    Walk,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RaggedAttention, RecurrentState, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_asr.qwen3_asr.config import Qwen3ASRConfig, audio_tokens
from mstar_asr.qwen3_asr.encoder import AudioEncoder
from mstar_asr.qwen3_asr.live import Rounds
from mstar_asr.qwen3_asr.sound import row_width
from mstar_asr.whisper.request import CONTEXT, HOP, RATE

__all__ = ["Qwen3ASR"]

_ORIGINAL = {
    "encoder": {"": "thinker.audio_tower."},
    "llm": {"model.": "thinker.model.", "lm_head.": "thinker.lm_head."},
}
_HF = {
    "encoder": {
        "": "model.audio_tower.",
        "proj1.": "model.multi_modal_projector.linear_1.",
        "proj2.": "model.multi_modal_projector.linear_2.",
    },
    "llm": {"model.": "model.language_model."},
}
"""Of each layout: node → its modules' prefixes → the published ones."""


class ListeningNode(EncoderLMNode):
    """The language model, with what a live clip needs beside."""

    def words(self, step: Step, ids: Tensor) -> dict[str, Tensor]:
        """Entry ``words``: *ids* int64 ``[N]`` → ``embeds`` ``[N, hidden]``."""
        return {"embeds": self.model.embed_tokens(ids)}

    def extend(self, step: Step, embeds: Tensor) -> dict[str, Tensor]:
        """Entry ``extend``: read *embeds* ``[N, hidden]`` and say nothing."""
        self.model(embeds.clone(), step["positions"].positions, step["kv"])
        return {}

    def join(self, step: Step, rest: Tensor, media: Packed) -> dict[str, Packed]:
        """Entry ``join``: each row's *media* ``[M, hidden]`` and then its *rest*, int64 ``[N]``, as ``ids`` and
        ``embeds``."""
        words = torch.split(rest, list(step.lengths))
        sounds = torch.split(media.data, list(media.lengths))
        ids, embeds, lengths = [], [], []
        for own, sound in zip(words, sounds, strict=True):
            ids += [own.new_full((len(sound),), self.placeholder), own]
            embeds += [sound.to(step.dtype), self.model.embed_tokens(own)]
            lengths.append(len(sound) + len(own))
        return {"ids": Packed(torch.cat(ids), lengths), "embeds": Packed(torch.cat(embeds), lengths)}


class Qwen3ASR(EncoderLM):
    """Both sizes, and both published layouts of their weights."""

    ignore = (r".*rotary_emb\.inv_freq", r".*audio_tower\.positional_embedding\..*")  # computed, wherever they are kept

    def __init__(self, context: BuildContext):
        self.sizes = Qwen3ASRConfig.from_hf(read_config(context.weights))
        super().__init__(context)
        self.options = context.options

    def decoder_config(self) -> DecoderConfig:
        return self.sizes.text

    def facts(self) -> EncoderLMFacts:
        audio = self.sizes.audio
        return EncoderLMFacts(
            media=Port("sound", "float32", ("S", row_width(audio.second))),
            placeholder=self.sizes.audio_token,
            attention=RaggedAttention(audio.heads, audio.heads, audio.hidden // audio.heads),
        )

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """For live clips: what their answers begin with is text."""
        assert self.context.weights is not None
        return TextTokenizer(self.context.weights)

    # --- graph --------------------------------------------------------------------------------------------------------
    def graph(self) -> Graph:
        plain, hidden = super().graph(), self.config.hidden
        (encoder, llm), audio = plain.nodes, self.sizes.audio
        seconds = Port("seconds", "int64", ("S",))
        media, embeds = Port("media", "model", ("M", hidden)), Port("embeds", "model", ("T", hidden))
        ids, rest = Port("ids", "int64", ("T",)), Port("rest", "int64", ("R",))
        listen = Entry(
            "listen",
            (
                seconds,
                Port("samples", "float32", ("N",)),
                Port("left", "int64", (), "stacked"),
                Port("last", "bool", (), "stacked"),
            ),
            (media,),
            resources=("encoder_attention", "loudest"),
        )
        words = Entry("words", (ids,), (embeds,))
        extend = Entry("extend", (embeds,), chunk="embeds", resources=("kv", "positions"))
        join = Entry("join", (rest, media), (ids, embeds))
        new: dict[str, Source] = {"samples": Pull("audio"), "left": Left("audio"), "last": AtEnd("audio")}
        hear = Call("encoder", "listen", {"seconds": "seconds", **new}, {"media": "media"})
        generate = plain.walks["generate"]
        assert isinstance(generate, Seq)
        prefill, decode = generate.parts
        assert isinstance(prefill, Call)
        joined = Call("llm", "join", {"rest": "rest", "media": "media"}, {"ids": "ids", "embeds": "embeds"})
        live: dict[str, Walk] = {
            "begin": Seq(
                Call("llm", "words", {"ids": "prompt"}, {"embeds": "embeds"}),
                Call("llm", "extend", {"embeds": "embeds"}),
            ),
            "listen": Loop(hear, Times(1)),  # ends with the stream
            "answer": Draft(Seq(joined, replace(prefill, inputs={"ids": "ids", "embeds": "embeds"}), decode), _KEPT),
            "keep": Call("llm", "extend", {"embeds": "media"}),
        }
        second, step = audio.second * HOP, self.options.live_step_s
        # a second's last spectrogram frame reaches into the next one
        chunk = Ramp((step * second + CONTEXT, step * second), left=(audio.window - step) * second + 2 * CONTEXT)
        most = self.options.live_seconds * RATE
        port = Port("sample", "float32", ())
        sound = Stream("audio", CLIENT, "main", port, "audio", chunk, capacity=chunk.sizes[0], max_items=most)
        (main,) = plain.partitions
        return replace(
            plain,
            nodes=(
                replace(encoder, entries=(*encoder.entries, listen)),
                replace(llm, entries=(*llm.entries, words, extend, join)),
            ),
            walks={**plain.walks, **live},
            partitions=(replace(main, walks=(*main.walks, *live)),),
            streams=(*plain.streams, sound),
            inputs=(*plain.inputs, replace(rest, optional=True), replace(seconds, optional=True)),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        if "audio" not in request.client_streams:
            yield from super().route(partition, request)
            return
        rounds, stops = Rounds(self.tokenizer), set(request.sampling["sampler"].stop_token_ids)
        after = np.asarray(request.inputs["rest"], np.int64)
        seconds, step, window = 0, self.options.live_step_s, self.sizes.audio.window
        yield Run("begin")
        while True:
            seconds += step
            heard = yield Run("listen", values={"seconds": np.arange(seconds)})
            if heard.reason == "end_of_input":
                return
            rest = np.concatenate((after, np.array(rounds.begin_ids, np.int64)))
            told = yield Run("answer", tokens=("sampler",), values={"rest": rest})
            rounds.heard([token for token in told.tokens["sampler"] if token not in stops])
            if seconds == window:
                yield Run("keep")
                seconds = 0

    # --- what a request holds -----------------------------------------------------------------------------------------
    def resources(self) -> Mapping[str, ResourceSpec]:
        found = dict(super().resources())
        # placeholders stand for other sounds each time: there is nothing to share
        found["kv"] = replace(found["kv"], prefix_cache=False)  # type: ignore[call-arg]
        return {**found, "loudest": RecurrentState({"level": ((1,), "float32")})}

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        if "audio" not in request.client_streams:
            yield from super().demand(request)
            return
        second = audio_tokens(self.sizes.audio.second, self.sizes.audio.second)
        answers = self.options.live_tokens(request.sampling["sampler"].max_tokens)
        sound = self.options.live_seconds * second
        tokens = len(request.inputs["prompt"]) + len(request.inputs["rest"]) + sound + answers
        yield Demand("kv", tokens=tokens)

    # --- modules ------------------------------------------------------------------------------------------------------
    def build_encoder(self) -> Node:
        return AudioEncoder(self.sizes.audio, self.options.live_step_s)

    def build(self, node: str) -> Node:
        return self.build_encoder() if node == "encoder" else ListeningNode(self.config, self.sizes.audio_token)

    def weights(self, node: str) -> WeightMap:
        layout = _ORIGINAL if self.sizes.original else _HF
        others = [prefix for name, prefixes in layout.items() if name != node for prefix in prefixes.values()]
        with torch.device("meta"):
            module = self.build(node)
        ignore = (*self.ignore, *(prefix.replace(".", r"\.") + ".*" for prefix in others))
        if node == "encoder":  # a tied head may be there or not, and has no prefix of its own
            ignore = (*ignore, r"(thinker\.)?lm_head\..*")
        return WeightMap.from_module(module, rename=layout[node], ignore=ignore)


_KEPT = ("kv", "positions")
