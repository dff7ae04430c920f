"""The 12 Hz codec's encoder: a clip to frames of sixteen codes. It is Mimi's (Défossez et al., 2024), of which
the first codebooks are used.

Reference: ``transformers`` 4.57.3, ``MimiModel.encode``, as ``qwen_tts`` 0.1.1 calls it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.node import Node, Packed, Step
from mstar.weights.names import WeightMap
from mstar_tts.codec_blocks import Carry, settle
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig, EncoderConfig, TransformerConfig
from mstar_tts.qwen3_tts.codec_quantizer import vectors
from mstar_tts.qwen3_tts.codec_transformer import EncoderLayer, causal_mask, rotary
from mstar_tts.seanet import encoder_layers, run
from mstar_tts.seanet_config import SeanetConfig

__all__ = ["ReferenceEncoder", "encoder_weights"]


class _Convolutions(nn.Module):
    def __init__(self, config: SeanetConfig):
        super().__init__()
        self.layers = nn.ModuleList(encoder_layers(config))

    def forward(self, x: Tensor) -> Tensor:
        return run(self.layers, x, Carry())


class _Transformer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.rotary = rotary(config)

    def forward(self, x: Tensor) -> Tensor:
        mask = causal_mask(self.rotary, x.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x, _ = layer(x, mask, None)
        return x


class _Downsample(nn.Module):
    """Half as many items. Before the first and behind the last one is repeated."""

    def __init__(self, channels: int, rate: int):
        super().__init__()
        self.rate = rate
        self.conv = nn.Conv1d(channels, channels, 2 * rate, stride=rate, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.pad(x, (self.rate, -x.shape[2] % self.rate), mode="replicate"))
        return y


class _Codebook(nn.Module):
    def __init__(self, codes: int, width: int):
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(codes), requires_grad=False)
        self.embed_sum = nn.Parameter(torch.zeros(codes, width), requires_grad=False)

    def settle(self) -> None:
        self.table = nn.Parameter(vectors(self.embed_sum, self.cluster_usage), requires_grad=False)
        del self.embed_sum, self.cluster_usage


class _Level(nn.Module):
    def __init__(self, codes: int, width: int):
        super().__init__()
        self.codebook = _Codebook(codes, width)


class _Quantizer(nn.Module):
    """Each codebook's nearest vector to what those before have left."""

    def __init__(self, config: EncoderConfig, count: int):
        super().__init__()
        hidden = config.transformer.hidden
        self.input_proj = nn.Conv1d(hidden, config.width, 1, bias=False) if config.width != hidden else None
        self.layers = nn.ModuleList(_Level(config.codebook, config.width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """*x* ``[1, hidden, R]`` to codes int64 ``[R, count]``."""
        rest = (x if self.input_proj is None else self.input_proj(x))[0].T.float()
        codes = []
        for level in self.layers:
            table: Tensor = level.codebook.table  # type: ignore[union-attr, assignment]
            nearest = torch.cdist(rest[None], table[None])[0].argmin(1)
            rest = rest - table[nearest]
            codes.append(nearest)
        return torch.stack(codes, 1)


class _Quantizers(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.semantic_residual_vector_quantizer = _Quantizer(config, config.semantic)
        self.acoustic_residual_vector_quantizer = _Quantizer(config, config.used - config.semantic)

    def forward(self, x: Tensor) -> Tensor:
        semantic, acoustic = self.semantic_residual_vector_quantizer(x), self.acoustic_residual_vector_quantizer(x)
        return torch.cat([semantic, acoustic], 1)


class _Mimi(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.encoder = _Convolutions(config.convolutions)
        self.encoder_transformer = _Transformer(config.transformer)
        self.downsample = _Downsample(config.transformer.hidden, config.down)
        self.quantizer = _Quantizers(config)

    def forward(self, clip: Tensor) -> Tensor:
        x = self.encoder(clip[None, None]).transpose(1, 2)
        codes: Tensor = self.quantizer(self.downsample(self.encoder_transformer(x).transpose(1, 2)))
        return codes


class ReferenceEncoder(Node):
    """Clips to frames, each by itself; float32 always."""

    def __init__(self, config: CodecConfig):
        super().__init__()
        self.encoder = _Mimi(config.encoder)

    def settle(self) -> None:
        """Once the published weights are in: compute from them what is used instead."""
        settle(self)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """None: every clip has another length."""
        return iter(())

    def forward(self, step: Step, clip: Tensor) -> dict[str, Packed]:
        """*clip*: float32 samples of all rows, one after the other, ``[N]``. Returns `frames` int64 ``[R, groups]``, of
        which each row has one for every ``samples_per_frame`` samples that it begins."""
        frames = [self.encoder(samples) for samples in torch.split(clip, list(step.lengths))]
        return {"frames": Packed(torch.cat(frames), [len(row) for row in frames])}


def encoder_weights(module: ReferenceEncoder) -> WeightMap:
    """The map of *module*. Codebooks beyond those used, and what only decoding needs, are left out."""
    quantizers = module.encoder.quantizer
    used = len(quantizers.acoustic_residual_vector_quantizer.layers)
    names = "|".join(map(str, range(used)))
    quantizer = r"encoder\.quantizer\.(semantic|acoustic)_residual_vector_quantizer"
    unused = (
        r"decoder\..*",
        rf"{quantizer}\.output_proj\.weight",
        rf"{quantizer}\.layers\.\d+\.codebook\.initialized",
        rf"encoder\.quantizer\.acoustic_residual_vector_quantizer\.layers\.(?!({names})\.)\d+\..*",
    )
    return WeightMap.from_module(module, ignore=unused, float32=(".*",), folder=FOLDER)
