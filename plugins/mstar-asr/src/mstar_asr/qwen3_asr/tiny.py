"""Tiny random checkpoints in both published layouts: ``python -m mstar_asr.qwen3_asr.tiny FOLDER``."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mstar.processing.bpe_files import QWEN2_PATTERN
from mstar.spec.tasks import Audio
from mstar.testing import Example
from mstar_asr.whisper.request import RATE

__all__ = ["draw", "write", "write_hf"]

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 48, 2, 4, 2, 16, 96
HEARD, HEARD_LAYERS, HEARD_HEADS, HEARD_FFN, CHANNELS, MELS = 32, 2, 4, 64, 8, 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
ASR_TEXT = "<asr_text>"
_CORPUS = [
    "Hello there, how are you today? The capital of France is Paris.",
    "system user assistant language English German French",
] * 4
Tensors = dict[str, torch.Tensor]


def write(folder: Path) -> None:
    """A checkpoint of a few dozen channels into *folder*, in the layout of the first release (``thinker.*``,
    ``vocab.json`` and ``merges.txt``)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.model.save(str(folder))
    names = [*SPECIAL, ASR_TEXT]
    added = {
        str(tokenizer.token_to_id(name)): {
            "content": name, "special": name != ASR_TEXT, "normalized": False,
            "lstrip": False, "rstrip": False, "single_word": False,
        }
        for name in names
    }  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "added_tokens_decoder": added},
    )
    audio, text, ids = _config(tokenizer)
    audio["model_type"], text["model_type"] = "qwen3_asr_audio_encoder", "qwen3_asr_text"
    text["rope_theta"] = 1e6
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    thinker = {"model_type": "qwen3_asr_thinker", "audio_config": audio, "text_config": text, **ids}
    _write_json(folder / "config.json", {"model_type": "qwen3_asr", "thinker_config": thinker, "support_languages": []})
    _write_generation(folder, tokenizer)
    tensors = _tensors(tokenizer)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({f"thinker.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")


def write_hf(folder: Path) -> None:
    """The same weights in the layout of transformers (``-hf``)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    audio, text, ids = _config(tokenizer)
    audio |= {"model_type": "qwen3_asr_encoder", "max_position_embeddings": 13}
    text |= {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    ends = {"pad_token_id": ids["pad_token_id"], "eos_token_id": ids["eos_token_id"]}
    config = {"model_type": "qwen3_asr", "audio_config": audio, "text_config": text, "tie_word_embeddings": True}
    timestamp = tokenizer.token_to_id("<|endoftext|>")
    _write_json(
        folder / "config.json",
        {**config, **ends, "audio_token_id": ids["audio_token_id"], "timestamp_token_id": timestamp},
    )
    _write_generation(folder, tokenizer)
    renamed = {}
    for name, tensor in _tensors(tokenizer).items():
        name = name.replace("audio_tower.proj", "multi_modal_projector.linear_")
        inner = name.removeprefix("model.")
        renamed[f"model.language_model.{inner}" if inner != name else f"model.{name}"] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def draw(key: str, rng: random.Random) -> Example:
    """A clip of tones and noise, up to 12 s: one window of attention, or two."""
    knobs: dict[str, Any] = {"max_tokens": rng.randint(3, 9)}
    if rng.random() < 0.3:
        knobs["language"] = rng.choice(("en", "German", "zh"))
    return Example(parts=(Audio(tones(rng, rng.choice((0.2, 1.0, 2.35, 12.4))), RATE),), knobs=knobs, live=())


def tones(rng: random.Random, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 samples at 16 kHz."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time))
    swell = 0.5 + 0.5 * np.sin(2 * math.pi * rng.uniform(0.2, 2.0) * time)
    samples = 0.3 * swell * np.sin(2 * math.pi * rng.uniform(80.0, 900.0) * time) + 0.02 * noise
    return samples.astype(np.float32)


def _tokenizer() -> Tokenizer:
    """Qwen2's BPE over bytes, with the tokens of speech."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(ASR_TEXT, special=False, normalized=False)])
    return tokenizer


def _config(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    audio = {
        "num_mel_bins": MELS,
        "encoder_layers": HEARD_LAYERS,
        "encoder_attention_heads": HEARD_HEADS,
        "encoder_ffn_dim": HEARD_FFN,
        "d_model": HEARD,
        "output_dim": HIDDEN,
        "downsample_hidden_size": CHANNELS,
        "n_window": 50,
        "n_window_infer": 800,
        "activation_function": "gelu",
        "scale_embedding": False,
    }
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    ids = {
        "audio_token_id": tokenizer.token_to_id("<|audio_pad|>"),
        "audio_start_token_id": tokenizer.token_to_id("<|audio_start|>"),
        "audio_end_token_id": tokenizer.token_to_id("<|audio_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|im_end|>"),
        "eos_token_id": [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")],
    }
    return audio, text, ids


def _write_generation(folder: Path, tokenizer: Tokenizer) -> None:
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    _write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})


def _tensors(tokenizer: Tokenizer) -> Tensors:
    """By the first release's names, without their prefix."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        width = 0.25 if len(shape) < 3 else (shape[1] * shape[2] * shape[3]) ** -0.5
        return torch.randn(shape, generator=generator) * width

    def linear(name: str, into: int, out: int, bias: bool = True) -> Tensors:
        found = {f"{name}.weight": draw(out, into)}
        return found | ({f"{name}.bias": draw(out)} if bias else {})

    def norm(name: str, size: int, bias: bool = True) -> Tensors:
        found = {f"{name}.weight": 1 + draw(size)}
        return found | ({f"{name}.bias": draw(size)} if bias else {})

    tensors: Tensors = {}
    for number, before in (("1", 1), ("2", CHANNELS), ("3", CHANNELS)):
        tensors[f"audio_tower.conv2d{number}.weight"] = draw(CHANNELS, before, 3, 3)
        tensors[f"audio_tower.conv2d{number}.bias"] = draw(CHANNELS)
    tensors |= linear("audio_tower.conv_out", CHANNELS * MELS // 8, HEARD, bias=False)
    for layer in range(HEARD_LAYERS):
        own = f"audio_tower.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= linear(f"{own}self_attn.{part}", HEARD, HEARD)
        tensors |= norm(f"{own}self_attn_layer_norm", HEARD) | norm(f"{own}final_layer_norm", HEARD)
        tensors |= linear(f"{own}fc1", HEARD, HEARD_FFN) | linear(f"{own}fc2", HEARD_FFN, HEARD)
    tensors |= norm("audio_tower.ln_post", HEARD)
    tensors |= linear("audio_tower.proj1", HEARD, HEARD) | linear("audio_tower.proj2", HEARD, HIDDEN)
    tensors["model.embed_tokens.weight"] = draw(tokenizer.get_vocab_size(), HIDDEN) * _said(tokenizer)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors |= linear(f"{own}self_attn.{part}_proj", HIDDEN, heads * HEAD_DIM, bias=False)
        tensors |= linear(f"{own}self_attn.o_proj", HEADS * HEAD_DIM, HIDDEN, bias=False)
        tensors[f"{own}self_attn.o_proj.weight"] *= 4  # what was heard counts for more than the last token
        for part in ("q", "k"):
            tensors |= norm(f"{own}self_attn.{part}_norm", HEAD_DIM, bias=False)
        for part, into, out in (("gate", HIDDEN, FFN), ("up", HIDDEN, FFN), ("down", FFN, HIDDEN)):
            tensors |= linear(f"{own}mlp.{part}_proj", into, out, bias=False)
        for part in ("input", "post_attention"):
            tensors |= norm(f"{own}{part}_layernorm", HIDDEN, bias=False)
    return tensors | norm("model.norm", HIDDEN, bias=False)


def _said(tokenizer: Tokenizer) -> torch.Tensor:
    """Narrow rows for tokens that no transcript has: the head is the embedding, so that it writes letters."""
    factors = torch.full((tokenizer.get_vocab_size(), 1), 0.2)
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.isascii() and text.replace(" ", "").isalpha():
            factors[token] = 1.0
    for name in ("<|im_end|>", ASR_TEXT):
        factors[tokenizer.token_to_id(name)] = 1.0
    return factors


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
