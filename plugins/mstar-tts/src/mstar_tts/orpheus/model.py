"""Orpheus' graph: a Llama that writes codes, and SNAC, which turns them into sound meanwhile."""

from __future__ import annotations

import torch

from mstar.nn.config import DecoderConfig, read_config
from mstar.nn.model import BuildContext
from mstar.nn.node import Node
from mstar.patterns.causal_lm import CausalLMNode
from mstar.patterns.lm_codec import LMCodec, LMCodecFacts, most_new
from mstar.patterns.shapes import DecoderShape, context_length
from mstar.spec.errors import SetupError
from mstar.spec.graph import Fixed, Ramp
from mstar.weights.names import WeightMap
from mstar_tts.orpheus.codec import Codec
from mstar_tts.orpheus.spec import OrpheusOptions
from mstar_tts.orpheus.tokens import FRAME, LEVELS, OrpheusTokens
from mstar_tts.snac.config import SnacConfig
from mstar_tts.watermark.audioseal import HOP
from mstar_tts.watermark.marking import marked

__all__ = ["MARKED", "SNAC", "Orpheus", "snac_config"]

MARKED = Fixed(6 * HOP)
"""Samples that are marked at once: the most that a frame has of the mark's steps, so the first frame is heard at once
and later ones 80 ms after it at most."""

SNAC = "snac"
"""The folder with the codec's checkpoint, in the language model's."""


def snac_config(context: BuildContext) -> SnacConfig:
    """:raises SetupError: there is no codec, or one that Orpheus' codes are not for."""
    if context.weights is None:
        raise SetupError("Orpheus needs weights; pass --weights DIR")
    folder = context.weights / SNAC
    if not folder.is_dir():
        raise SetupError(
            f"{folder} does not exist: put SNAC's checkpoint there (hubertsiuzdak/snac_24khz: config.json and "
            "pytorch_model.bin)"
        )
    config = SnacConfig.read(read_config(folder), f"{SNAC}/config.json")
    if [len(level) for level in LEVELS] != [config.strides[0] // stride for stride in config.strides]:
        raise SetupError(f"{SNAC}/config.json: vq_strides {config.strides}; Orpheus writes codes for 4, 2 and 1")
    return config


@marked(lambda model: MARKED)
class Orpheus(LMCodec):
    """Orpheus 3B, and models trained in its way."""

    def __init__(self, context: BuildContext):
        super().__init__(context)
        config = read_config(context.weights)
        self.options: OrpheusOptions = context.options
        self.lm, self.snac = DecoderConfig.from_hf(config), snac_config(context)
        self.tokens = OrpheusTokens.read(config, self.snac.codes)
        if self.tokens.end > self.lm.vocab:
            raise SetupError(f"config.json: vocab_size {self.lm.vocab} has no room for {self.tokens.end} tokens")
        self.max_tokens = context_length(self.options, self.lm)
        if self.options.overlap_ms and not self.options.ahead_frames:
            raise SetupError("model_kwargs.overlap_ms needs ahead_frames of at least 1: what overlaps is made of them")
        if self.options.overlap_ms and self.options.audio_watermark.enabled:
            raise SetupError("model_kwargs.overlap_ms: with audio_watermark no sound overlaps; leave one of them out")

    def facts(self) -> LMCodecFacts:
        options = self.options
        return LMCodecFacts(
            lm=DecoderShape.of(self.lm, self.max_tokens),
            rate=self.snac.rate,
            samples=self.snac.frame_samples,
            chunk=self._chunk(),
            codes=self.tokens.ranges,
            noise=True,
            penalised=True,
            cut=True,
            overlap=overlap(options, self.snac),
            codec_rows=options.codec_rows,
        )

    def _chunk(self) -> Ramp | Fixed:
        options, sizes = self.options, self.options.chunk_frames
        around = (options.left_frames, options.ahead_frames, FRAME)
        return Ramp(sizes, *around) if len(sizes) > 1 else Fixed(sizes[0], *around)

    def build(self, node: str) -> Node:
        if node == "lm":
            return CausalLMNode(self.lm)
        extra = 1 if self.options.overlap_ms else 0  # what overlaps is asked for as a frame more
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.options.codec_dtype]
        asked = {window: new + extra for window, new in most_new(self._chunk()).items()}
        return Codec(self.snac, self.tokens, asked, dtype)

    def weights(self, node: str) -> WeightMap:
        with torch.device("meta"):
            module = self.build(node)
        if node == "lm":
            return WeightMap.from_module(module, ignore=(r".*rotary_emb\.inv_freq",))
        unused = (r"encoder\..*", r"quantizer\.quantizers\.\d+\.in_proj\..*")
        return WeightMap.from_module(module, ignore=unused, float32=(".*",), folder=SNAC)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Codec):
            module.settle(module.dtype)


def overlap(options: OrpheusOptions, snac: SnacConfig) -> int:
    """Samples that are cross-faded where two windows meet."""
    return min(round(options.overlap_ms * snac.rate / 1000), snac.frame_samples)
