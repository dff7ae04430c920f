"""A tiny random Orpheus in the published layout: what tests and the conformance suite serve."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor, nn

from mstar.nn.config import DecoderConfig
from mstar.patterns.causal_lm import CausalLMNode
from mstar.testing import Example
from mstar.testing.tiny_tokenizers import byte_level, write_folder
from mstar.weights.names import WeightMap
from mstar_tts.orpheus.spec import VOICES
from mstar_tts.orpheus.tokens import FRAME, OrpheusTokens
from mstar_tts.snac.config import SnacConfig
from mstar_tts.snac.decoder import SnacDecoder

__all__ = ["SNAC_CONFIG", "draw", "write_orpheus", "write_snac"]

SNAC_CONFIG: dict[str, Any] = {
    "sampling_rate": 24_000,
    "encoder_dim": 2,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 32,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 16,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
_CUSTOM_TOKENS = 12
"""Beside the codes."""


def write_orpheus(folder: Path, **sizes: int) -> None:
    """Write a language model that keeps to the order of a frame's codes, and now and then ends, and a SNAC to *folder*.

    :param sizes: of the language model, instead of the tiny ones, as its config names them.
    """
    generator = torch.Generator().manual_seed(7)
    tokenizer, tokens = _tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
        "first_custom_token": tokens.custom,
        "vocab_size": tokenizer.get_vocab_size(),
        **sizes,
    }
    write_folder(folder, tokenizer, template=None, **config)
    with torch.device("meta"):
        lm = CausalLMNode(DecoderConfig.from_hf(config))
    tensors = _drawn(lm, generator)
    _in_order(tensors, tokens)
    save_file(tensors, folder / "model.safetensors")
    (folder / "snac").mkdir()
    write_snac(folder / "snac")


def write_snac(folder: Path, **changes: Any) -> None:
    """Write ``pytorch_model.bin`` and its config, with *changes*, to *folder*. Of the encoding half there is one tensor
    of each kind."""
    generator = torch.Generator().manual_seed(11)
    config = {**SNAC_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        decoder = SnacDecoder(SnacConfig.read(config))
    tensors = _drawn(decoder, generator)
    tensors["encoder.block.0.bias"] = torch.zeros(config["encoder_dim"])
    for number in range(len(config["vq_strides"])):
        tensors[f"quantizer.quantizers.{number}.in_proj.bias"] = torch.zeros(config["codebook_dim"])
    torch.save(tensors, folder / "pytorch_model.bin")


def draw(key: str, rng: random.Random) -> Example:
    """A few words, and enough tokens for a few frames of sound."""
    words = rng.choices(("oh", "well", "<laugh>", "it", "is", "one", "small", "bird"), k=rng.randint(1, 6))
    knobs: dict[str, Any] = {"max_tokens": rng.randint(4, 9) * FRAME, "min_tokens": 2 * FRAME}
    if rng.random() < 0.5:
        knobs["voice"] = rng.choice(VOICES)
    return Example(" ".join(words) + " so.", knobs, tolerance=1e-4)


def _tokenizer() -> tuple[Tokenizer, OrpheusTokens]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", pair=f"{begin[0]} $A $B", special_tokens=[begin]
    )
    tokens = OrpheusTokens(tokenizer.get_vocab_size(), SNAC_CONFIG["codebook_size"])
    count = _CUSTOM_TOKENS + FRAME * tokens.codes
    tokenizer.add_special_tokens([f"<custom_token_{number}>" for number in range(count)])
    return tokenizer, tokens


def _drawn(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Values of a trained model's size under the published names."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    tensors = {}
    for place in WeightMap.from_module(module).placements:
        shape = list(shapes[place.target])
        if place.rows is not None:
            shape[0] = place.rows
        tensors[place.published] = _values(place.published, shape, generator)
    return tensors


def _values(name: str, shape: list[int], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "alpha")):
        return 1 + 0.2 * drawn
    if name.endswith("original0"):  # a weight norm's lengths
        return 0.5 + 0.1 * drawn.abs()
    if len(shape) == 1:
        return 0.1 * drawn
    return drawn if name.endswith(("embed_tokens.weight", "codebook.weight", "original1")) else drawn * shape[1] ** -0.5


def _in_order(tensors: dict[str, Tensor], tokens: OrpheusTokens) -> None:
    """Let the first channels say which place of a frame a token is for, and the head ask for the next one; behind a
    whole frame the end of speech is as likely as a few codes are."""
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    strength = 12.0
    embedding[:, :FRAME] = 0
    embedding[tokens.before_speech[-1], FRAME - 1] = strength
    head[:, :FRAME] = -1
    for place, (first, behind) in enumerate(tokens.ranges):
        embedding[first:behind, place] = strength
        head[first:behind, (place - 1) % FRAME] = 4
    head[tokens.end_of_speech, FRAME - 1] = 4
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        for layer in range(2):
            tensors[f"model.layers.{layer}.{name}.weight"] *= 0.5


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write_orpheus(Path(sys.argv[1]))
