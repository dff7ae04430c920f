"""A tiny random codec and speaker encoder in the published layout, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar_tts.qwen3_tts.codec import Codec
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig, SpeakerConfig
from mstar_tts.qwen3_tts.codec_encoder import ReferenceEncoder
from mstar_tts.qwen3_tts.speaker_encoder import SpeakerEncoder

__all__ = ["CODEC", "speaker_config", "speaker_tensors", "write_codec"]

CODEC: dict[str, Any] = {
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_valid_num_quantizers": 16,
    "input_sample_rate": 24_000,
    "output_sample_rate": 24_000,
    "decode_upsample_rate": 1920,
    "encode_downsample_rate": 1920,
    "encoder_config": {
        "hidden_size": 32,
        "num_filters": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "codebook_size": 64,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_quantizers": 18,
        "upsample_groups": 32,
    },
    "decoder_config": {
        "codebook_size": 64,
        "codebook_dim": 32,
        "hidden_size": 24,
        "latent_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "sliding_window": 8,
        "decoder_dim": 64,
    },
}
"""Windows of eight frames and sixty-four values of a code; a frame is as long as the published one's."""


def write_codec(folder: Path, random: torch.Generator) -> None:
    """Write the codec's own folder to *folder*."""
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CODEC), encoding="utf-8")
    (place / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 24_000}), encoding="utf-8")
    config = CodecConfig.read(CODEC)
    with torch.device("meta"):
        codec, encoder = Codec(config), ReferenceEncoder(config)
    tensors = _drawn(codec, random, 0.6) | _drawn(encoder, random, 1.6) | _unused(random)
    save_file(tensors, place / "model.safetensors")


def _unused(random: torch.Generator) -> dict[str, Tensor]:
    """Tensors that are published and not needed here."""
    tensors = {}
    sizes = CODEC["encoder_config"]
    book, width = (sizes["codebook_size"], sizes["codebook_dim"]), CODEC["decoder_config"]["codebook_dim"]
    quantizer = "encoder.quantizer.{}_residual_vector_quantizer"
    for kind, count in (("semantic", 1), ("acoustic", sizes["num_quantizers"] - 1)):
        name = quantizer.format(kind)
        tensors[f"{name}.output_proj.weight"] = torch.randn(sizes["hidden_size"], book[1], 1, generator=random)
        for index in range(count):
            tensors[f"{name}.layers.{index}.codebook.initialized"] = torch.ones(1)
            if index >= CODEC["encoder_valid_num_quantizers"] - 1:
                tensors[f"{name}.layers.{index}.codebook.cluster_usage"] = torch.ones(book[0])
                tensors[f"{name}.layers.{index}.codebook.embed_sum"] = torch.randn(book, generator=random)
    for kind in ("first", "rest"):
        tensors[f"decoder.quantizer.rvq_{kind}.input_proj.weight"] = torch.randn(width // 2, width, 1, generator=random)
    return tensors


def speaker_config(hidden: int) -> dict[str, Any]:
    """The ``speaker_encoder_config`` of one that gives vectors of *hidden* numbers."""
    return {
        "mel_dim": 16,
        "enc_dim": hidden,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 4,
        "enc_se_channels": 8,
        "sample_rate": 24_000,
    }


def speaker_tensors(config: Mapping[str, Any], random: torch.Generator) -> dict[str, Tensor]:
    """Its tensors, under the names of the model's checkpoint."""
    with torch.device("meta"):
        module = SpeakerEncoder(SpeakerConfig.read(config))
    return {f"speaker_encoder.{name}": value for name, value in _drawn(module, random, 1.4).items()}


def _drawn(module: nn.Module, random: torch.Generator, gain: float) -> dict[str, Tensor]:
    """Random tensors for all of *module*'s published names; *gain* so that signals neither vanish nor explode."""
    tensors = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            drawn = torch.randn(parameter.shape, generator=random)
            for published, value in _split(owner, path, name, _scaled(owner, name, drawn, gain)):
                tensors[published] = value.contiguous()
    return tensors


def _scaled(owner: nn.Module, name: str, drawn: Tensor, gain: float) -> Tensor:
    if name == "cluster_usage":
        return 0.5 + drawn.abs()
    if name == "scale" or (name == "weight" and drawn.ndim == 1):
        return 1 + 0.2 * drawn
    if name == "weight":
        taps = drawn[:, 0].numel() if isinstance(owner, nn.ConvTranspose1d) else drawn[0].numel()
        return drawn * float(gain * taps**-0.5)
    return drawn * (1.0 if name in ("embed_sum", "embedding_sum") else 0.1)


def _split(owner: nn.Module, path: str, name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Fused layers' parts under their published names."""
    parts: Mapping[str, int] = getattr(owner, "parts", {})
    if not parts:
        return [(f"{path}.{name}" if path else name, value)]
    parent = path.rpartition(".")[0]
    pieces = value.split(list(parts.values()))  # type: ignore[no-untyped-call]
    return [(f"{parent}.{part}.{name}", piece) for part, piece in zip(parts, pieces, strict=True)]
