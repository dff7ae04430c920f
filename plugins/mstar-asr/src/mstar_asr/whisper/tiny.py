"""Tiny random checkpoints in the published layout: ``python -m mstar_asr.whisper.tiny FOLDER``."""

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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mstar.spec.tasks import Audio
from mstar.testing import Example
from mstar_asr.whisper.request import RATE

__all__ = ["draw", "write", "write_english"]

LAYERS, FFN, MELS, POSITIONS = 2, 64, 16, 64
LANGUAGES = ("en", "de", "ja", "haw")
_CORPUS = [
    "Hello there, how are you today? The capital of France is Paris.",
    "And so, my fellow Americans: ask not.",
] * 4
Shapes = dict[str, tuple[int, ...]]


def write(folder: Path, hidden: int = 32, heads: int = 4) -> None:
    """A multilingual checkpoint of a few dozen channels into *folder*."""
    _write(folder, LANGUAGES, hidden, heads)


def write_english(folder: Path) -> None:
    """An English-only one."""
    _write(folder, (), 32, 4)


def draw(key: str, rng: random.Random) -> Example:
    """A clip of tones and noise, up to 4 s, and to be heard although nobody speaks in it."""
    seconds, pitch = rng.uniform(0.3, 4.0), rng.uniform(80.0, 900.0)
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time))
    samples = 0.3 * np.sin(2 * math.pi * pitch * time) + 0.05 * noise
    knobs: dict[str, Any] = {"max_tokens": 6 + rng.randint(3, 9), "temperature_increment": 0.0, "vad_filter": False}
    return Example(parts=(Audio(samples.astype(np.float32), RATE),), knobs=knobs)


def _write(folder: Path, languages: tuple[str, ...], hidden: int, heads: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(languages)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    )
    _write_json(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": MELS,
            "sampling_rate": RATE,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 30,
            "padding_value": 0.0,
        },
    )
    vocab, eot = tokenizer.get_vocab_size(), ids["<|endoftext|>"]
    _write_json(folder / "config.json", _config(vocab, eot, ids["<|startoftranscript|>"], hidden, heads))
    generation: dict[str, Any] = {
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "is_multilingual": bool(languages),
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": POSITIONS,
        "return_timestamps": False,
        "alignment_heads": [[0, 1], [1, 0], [1, heads - 1]],
        "begin_suppress_tokens": [ids["Ġ"], eot],
        "suppress_tokens": [1, 2, 7, *(ids[f"<|{name}|>"] for name in _CONTROLS if name != "notimestamps")],
    }
    if languages:
        generation["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in languages}
        generation["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    _write_json(folder / "generation_config.json", generation)
    draw = torch.Generator().manual_seed(7)
    tensors = {name: _random(name, shape, draw) for name, shape in _shapes(vocab, hidden).items()}
    tensors["model.decoder.embed_tokens.weight"][eot:] *= 0.4  # there are so many that text would hardly come
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


_CONTROLS = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def _tokenizer(languages: tuple[str, ...]) -> Tokenizer:
    """BPE over bytes as Whisper's, with its special tokens in its order: their ids follow each other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    names = ("endoftext", _CONTROLS[0], *languages, *_CONTROLS[1:])
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    times = [AddedToken(f"<|{step * 0.02:.2f}|>", special=False, normalized=False) for step in range(1501)]
    tokenizer.add_tokens(times)
    return tokenizer


def _config(vocab: int, eot: int, sot: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocab,
        "num_mel_bins": MELS,
        "d_model": hidden,
        "encoder_layers": LAYERS,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": FFN,
        "decoder_layers": LAYERS,
        "decoder_attention_heads": heads,
        "decoder_ffn_dim": FFN,
        "max_source_positions": 1500,
        "max_target_positions": POSITIONS,
        "activation_function": "gelu",
        "scale_embedding": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "decoder_start_token_id": sot,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def _random(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Norms around one; all else so wide that answers depend on every token, and on what is heard most of all."""
    width = 0.25
    if "conv" in name and len(shape) == 3:
        width = (shape[1] * shape[2]) ** -0.5
    elif "encoder_attn." in name:
        width = 0.6
    elif "embed_tokens" in name:
        width = 0.1
    return torch.randn(shape, generator=draw) * width + name.endswith("norm.weight")


def _shapes(vocab: int, hidden: int) -> Shapes:
    """The published names, and what is under each."""
    found: Shapes = {
        "model.encoder.conv1.weight": (hidden, MELS, 3),
        "model.encoder.conv1.bias": (hidden,),
        "model.encoder.conv2.weight": (hidden, hidden, 3),
        "model.encoder.conv2.bias": (hidden,),
        "model.encoder.embed_positions.weight": (1500, hidden),
        "model.decoder.embed_tokens.weight": (vocab, hidden),
        "model.decoder.embed_positions.weight": (POSITIONS, hidden),
    }
    for side in ("encoder", "decoder"):
        found |= _norm(f"model.{side}.layer_norm", hidden)
        for layer in range(LAYERS):
            prefix = f"model.{side}.layers.{layer}."
            found |= _attention(f"{prefix}self_attn", hidden)
            if side == "decoder":
                found |= _attention(f"{prefix}encoder_attn", hidden)
            found |= {f"{prefix}fc1.weight": (FFN, hidden), f"{prefix}fc1.bias": (FFN,)}
            found |= {f"{prefix}fc2.weight": (hidden, FFN), f"{prefix}fc2.bias": (hidden,)}
            found |= _norm(f"{prefix}final_layer_norm", hidden)
    return found


def _attention(name: str, hidden: int) -> Shapes:
    parts = {f"{name}.{part}.weight": (hidden, hidden) for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
    biases = {f"{name}.{part}.bias": (hidden,) for part in ("q_proj", "v_proj", "out_proj")}
    return {**parts, **biases, **_norm(f"{name}_layer_norm", hidden)}


def _norm(name: str, hidden: int) -> Shapes:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
