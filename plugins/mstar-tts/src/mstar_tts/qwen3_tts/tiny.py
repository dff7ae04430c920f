"""Tiny random Qwen3-TTS checkpoints in the published layout: what tests and the conformance suite serve."""

from __future__ import annotations

import json
import random as _random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar.spec.tasks import Audio
from mstar.testing import Example
from mstar.testing.tiny_tokenizers import byte_level, id_of, write_folder
from mstar_tts.qwen3_tts.codec_tiny import speaker_config, speaker_tensors, write_codec
from mstar_tts.qwen3_tts.config import TTSConfig
from mstar_tts.qwen3_tts.talker import Talker, talker_weights

__all__ = [
    "draw",
    "tiny_config",
    "write",
    "write_qwen3_tts",
    "write_qwen3_tts_1p7b",
    "write_qwen3_tts_base",
    "write_qwen3_tts_voicedesign",
]

CODES = 64
_TEXT_TOKENS = ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 4096,
    "num_code_groups": 16,
}
_ROPE = {"mrope_section": [4, 2, 2], "interleaved": True, "rope_type": "default"}


def tiny_config(
    variant: str, size: str, predictor_width: int, predictor_layers: int, text: dict[str, int]
) -> dict[str, Any]:
    """A ``config.json``.

    :param size: ``tts_model_size``, as published: ``0b6`` or ``1b7``. :param text: ids of the three tokens of texts,
        and ``vocab``.
    """
    first = CODES + 100
    names = ("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos")
    languages = ("chinese", "english", "german", "beijing_dialect")
    talker: dict[str, Any] = {
        **_SIZES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": CODES + 1024,
        "text_hidden_size": 24,
        "text_vocab_size": text["vocab"],
        "rope_scaling": _ROPE,
        **{f"codec_{name}_id": first + number for number, name in enumerate(names)},
        "codec_language_id": {name: first + 20 + number for number, name in enumerate(languages)},
        "spk_id": {},
        "spk_is_dialect": {},
        "code_predictor_config": {
            **_SIZES,
            "hidden_size": predictor_width,
            "intermediate_size": 40,
            "vocab_size": CODES,
            "num_hidden_layers": predictor_layers,
            "max_window_layers": 28,
            "layer_types": ["full_attention"] * predictor_layers,
        },
    }
    if variant == "custom_voice":
        talker["spk_id"] = {"vivian": first + 40, "ryan": first + 41, "dylan": first + 42}
        talker["spk_is_dialect"] = {"vivian": False, "ryan": False, "dylan": "beijing_dialect"}
    return {
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": variant,
        "tts_model_size": size,
        "tts_pad_token_id": text["<tts_pad>"],
        "tts_bos_token_id": text["<tts_text_bos>"],
        "tts_eos_token_id": text["<tts_text_eod>"],
        "talker_config": talker,
    }


def write(folder: Path, variant: str, size: str, predictor_width: int = 24, predictor_layers: int = 1) -> None:
    """Write a checkpoint to *folder*, which exists."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["assistant", "user"])
    tokenizer.add_special_tokens(list(_TEXT_TOKENS))
    text = {"vocab": tokenizer.get_vocab_size(), **{token: id_of(tokenizer, token) for token in _TEXT_TOKENS}}
    random = torch.Generator().manual_seed(11)
    config = tiny_config(variant, size, predictor_width, predictor_layers, text)
    tensors: dict[str, Tensor] = {}
    if variant == "base":
        config["speaker_encoder_config"] = speaker_config(config["talker_config"]["hidden_size"])
        tensors |= speaker_tensors(config["speaker_encoder_config"], random)
    write_folder(folder, tokenizer, template=None, **config)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2048, "repetition_penalty": 1.05}))
    tensors |= _talker_tensors(TTSConfig.read(folder), random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_codec(folder, random)


def _talker_tensors(config: TTSConfig, random: torch.Generator) -> dict[str, Tensor]:
    with torch.device("meta"):
        talker = Talker(config, queue=1, voiced=False)
    shapes = {name: parameter.shape for name, parameter in talker.named_parameters()}
    found: dict[str, Tensor] = {}
    for place in talker_weights(talker, ()).placements:
        shape = list(shapes[place.target])
        if place.rows is not None:
            shape[0] = place.rows
        drawn = torch.randn(shape, generator=random)
        if place.published.endswith("norm.weight"):
            drawn = 1 + 0.2 * drawn
        elif len(shape) > 1 and "embedding" not in place.published:
            drawn = drawn * (2.0 * drawn[0].numel() ** -0.5)
        found[place.published] = drawn
    return found


def write_qwen3_tts(folder: Path) -> None:
    """As wide a code predictor as the talker: there is no projection between them."""
    write(folder, "custom_voice", "0b6", predictor_width=32)


def write_qwen3_tts_1p7b(folder: Path) -> None:
    write(folder, "custom_voice", "1b7", predictor_layers=2)


def write_qwen3_tts_voicedesign(folder: Path) -> None:
    write(folder, "voice_design", "1b7")


def write_qwen3_tts_base(folder: Path) -> None:
    write(folder, "base", "1b7")


def draw(key: str, rng: _random.Random) -> Example:
    """A sample request: short texts, few frames, and a voice where the model has none of its own."""
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "bird")
    text = " ".join(rng.choice(words) for _ in range(rng.choice((1, 2, 5, 9))))
    knobs: dict[str, Any] = {"max_new_tokens": rng.randint(3, 6)}
    if key == "qwen3_tts_voicedesign":
        knobs["instruct"] = rng.choice(("a low voice", "a child"))
    if key != "qwen3_tts_base":
        return Example(text, knobs)
    noise = np.random.default_rng(rng.randrange(1 << 20)).normal(0, 0.1, rng.choice((12_000, 13_000)))
    clip = Audio(noise.astype(np.float32), 24_000)
    knobs |= {"ref_text": rng.choice(("one bird", "a mat")), "x_vector_only_mode": rng.random() < 0.5}
    return Example(text, knobs, parts=(clip,))


if __name__ == "__main__":
    folder, key = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "qwen3_tts"
    folder.mkdir(parents=True, exist_ok=True)
    globals()[f"write_{key}"](folder)
