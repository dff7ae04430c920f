"""Kokoro's graph: a text half, its frames, and a frame half that batches rows of one padded length."""

from __future__ import annotations

from dataclasses import replace

import torch

from mstar.nn.config import read_config
from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node
from mstar.spec.errors import SetupError
from mstar.spec.graph import CLIENT, Call, Entry, Graph, NodeSpec, Param, Partition, Port, Seq, Stream, Whole
from mstar.weights.checkpoint import open_checkpoint
from mstar.weights.names import WeightMap
from mstar_tts.kokoro.config import KokoroConfig
from mstar_tts.kokoro.nodes import FrameHalf, TextHalf
from mstar_tts.watermark.marking import marked

__all__ = ["Kokoro"]

_PARTS = ("bert", "bert_encoder", "predictor", "text_encoder", "decoder")
_IN = r"\.(module\.)?"
_BY_TEXT = (rf"(bert|bert_encoder|text_encoder){_IN}.*", rf"predictor{_IN}(text_encoder|lstm|duration_proj)\..*")
_BY_FRAMES = (rf"decoder{_IN}.*", rf"predictor{_IN}(shared|F0|N|F0_proj|N_proj)\..*")
_TEXT_ROWS = (1, 4, 16, 64)
"""To how many rows captured steps of the text half are filled up: few sizes, since there is one of each for each
length, and a row costs little beside the launches of a step."""
_MOST_ROWS = 32
"""Of the frame half's steps on a GPU. Beyond, a step is computed in parts anyway."""
_BY_NOBODY = (rf"bert{_IN}pooler\..*", rf"bert{_IN}embeddings\.position_ids")


@marked(lambda model: Whole())
class Kokoro(Model):
    """Kokoro-82M and models of its architecture."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.config = KokoroConfig.read(read_config(context.weights))
        self.options = context.options

    def graph(self) -> Graph:
        config = self.config
        styled, spoken = config.hidden + config.style, config.hidden
        length, speed, most = (
            Port("length", "int64", (), "stacked"),
            Port("speed", "float32", (), "stacked"),
            Port("most", "int64", (), "stacked"),
        )
        ids, style = Port("ids", "int64", ("T",), "stacked"), Port("style", "float32", (2 * config.style,), "stacked")
        durations = Port("durations", "int64", ("T",), "stacked")
        prosody, text = (
            Port(name, "float32", ("T", n), "stacked") for name, n in (("prosody", styled), ("text", spoken))
        )
        each = tuple(replace(port, layout="list") for port in (durations, prosody, text))
        frames, key = Port("frames", "int64", (), "stacked"), Port("noise_key", "int64", (), "stacked")
        spread = (
            Port("prosody_frames", "float32", ("F", styled), "list"),
            Port("text_frames", "float32", ("F", spoken), "list"),
        )
        padded = (
            Port("prosody", "float32", ("F", styled), "stacked"),
            Port("text", "float32", ("F", spoken), "stacked"),
        )
        samples = Port("samples", "float32", ("S",), "stacked")
        read = Call(
            "text",
            inputs={"ids": "ids", "length": "length", "style": "style", "speed": Param("speed")},
            outputs={"durations": "durations", "prosody": "prosody", "text": "text"},
            emit={"durations": "durations"},
        )
        align = Call(
            "text",
            "align",
            inputs={"durations": "durations", "prosody": "prosody", "text": "text", "most": "most"},
            outputs={"prosody_frames": "prosody_frames", "text_frames": "text_frames", "frames": "frames"},
        )
        speak = Call(
            "frames",
            inputs={
                "prosody": "prosody_frames",
                "text": "text_frames",
                "frames": "frames",
                "style": "style",
                "noise_key": "noise_key",
            },
            emit={"samples": "audio"},
        )
        return Graph(
            nodes=(
                NodeSpec(
                    "text",
                    (
                        Entry(inputs=(ids, length, style, speed), outputs=(durations, prosody, text)),
                        Entry("align", inputs=(*each, most), outputs=(*spread, frames)),
                    ),
                    _TEXT_ROWS[-1],
                    _TEXT_ROWS,
                ),
                NodeSpec(
                    "frames",
                    (Entry(inputs=(*padded, frames, style, key), outputs=(samples,)),),
                    self._most_rows(),
                    tuple(1 << n for n in range((self._most_rows() - 1).bit_length() + 1)),
                ),
            ),
            walks={"speak": Seq(read, align, speak)},
            partitions=(Partition("main", ("speak",)),),
            streams=(
                Stream("durations", "main", CLIENT, durations, "durations"),
                Stream("audio", "main", CLIENT, samples, "audio"),
            ),
            inputs=(ids, length, style, most, key),
        )

    def _most_rows(self) -> int:
        """On a CPU rows gain nothing from company, and would wait for each other."""
        most: int | None = self.options.max_batch_rows
        return most or (1 if self.context.device.type == "cpu" else _MOST_ROWS)

    def build(self, node: str) -> Node:
        options = self.options
        if node == "text":
            return TextHalf(self.config, options.frame_buckets, options.frame_grouping == "single")
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.decoder_dtype]
        return FrameHalf(self.config, options.max_batch_frames, dtype, options.compile_decoder)

    def weights(self, node: str) -> WeightMap:
        """Both halves read parts of one file. The published one has a ``module.`` behind each part's name."""
        if self.context.weights is None:
            raise SetupError("Kokoro needs weights; pass --weights DIR")
        names = open_checkpoint(self.context.weights).tensors
        wrapped = any(name.startswith("decoder.module.") for name in names)
        prefixes = {f"{part}.": f"{part}.module." for part in _PARTS} if wrapped else {}
        ignore = (*_BY_FRAMES, *_BY_NOBODY) if node == "text" else (*_BY_TEXT, *_BY_NOBODY)
        with torch.device("meta"):
            module = self.build(node)
        return WeightMap.from_module(module, prefixes, ignore, float32=(".*",))

    def loaded(self, node: str, module: Node) -> None:
        assert isinstance(module, TextHalf | FrameHalf)
        module.multiply_out()
