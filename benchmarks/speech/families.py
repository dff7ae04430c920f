"""The speaking models that are measured: how each is made at its published shape, what it is asked, and its floor."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gpu.shapes import SHAPES, Shape
from image.random_weights import draw
from torch import Tensor, nn

from mstar.testing.tiny_tokenizers import byte_level, write_folder
from mstar.weights import loader
from mstar.weights.names import WeightMap

__all__ = ["FAMILIES", "Family", "random_weights"]

SENTENCE = "The old lighthouse keeper counted the ships that passed and wrote their names into a book of blue paper."


@dataclass(frozen=True)
class Family:
    """One model.

    :param write: makes the folder that it is loaded from, at the published shape. :param edit: called with each drawn
        parameter (node, name, tensor) of a model whose weights are drawn on the device; ``None``: the folder has them.
    :param text: what a request says; *seconds* is for the models that are told how long to go on.
    :param options: ``model_kwargs``; a language model's with ``max_tokens``.
    :param knobs: of a request of so many seconds. :param streams: how many at once are measured.
    :param floor: (products of a step, how often, what a second of sound takes of them), see :mod:`speech.floors`.
    """

    key: str
    write: Callable[[Path], None]
    knobs: Callable[[float], dict[str, Any]]
    edit: Callable[[str, str, Tensor], None] | None = None
    text: str = SENTENCE
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_tokens: int = 0
    streams: Sequence[int] = (1, 8, 32, 64)
    parts: tuple[tuple[Shape, int], ...] = ()
    steps_per_s: float = 0.0


# --- weights that are drawn on the device ----------------------------------------------------------------------------
@contextmanager
def random_weights(edit: Callable[[str, str, Tensor], None] | None) -> Iterator[None]:
    """Within it, checkpoints are not read: parameters are drawn, and *edit* sees each of them."""
    if edit is None:
        yield
        return
    load, mismatches = loader.load, loader.mismatches

    def drawn(
        module: nn.Module,
        names: WeightMap,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        progress: Any = None,
    ) -> None:
        loader._materialise(module, names, device, dtype)
        draw(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                edit(names.folder, name, parameter)
        module.eval()

    loader.load, loader.mismatches = drawn, lambda *_: []  # type: ignore[assignment]
    try:
        yield
    finally:
        loader.load, loader.mismatches = load, mismatches


def _codec_like(name: str, parameter: Tensor) -> None:
    """Gains and frequencies of a trained codec's size: drawn around zero they would make anything of the sound."""
    if name.endswith(("alpha", "beta")):
        parameter.fill_(1 if parameter.ndim > 1 else 0)  # Snake's own, and its logarithm
    elif name.endswith("original0"):
        parameter.fill_(0.58)


# --- Orpheus ---------------------------------------------------------------------------------------------------------
_ORPHEUS = Shape("orpheus", {**SHAPES["llama-3.2-3b"].config, "vocab_size": 156_940, "tie_word_embeddings": False})
_SNAC = {
    "sampling_rate": 24_000,
    "encoder_dim": 48,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1024,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 4096,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


def _write_orpheus(folder: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    write_folder(folder, tokenizer, template=None, **{**_ORPHEUS.config, "vocab_size": _ORPHEUS.facts.vocab})
    (folder / "snac").mkdir()
    (folder / "snac" / "config.json").write_text(json.dumps(_SNAC))


def _speak_in_order(folder: str, name: str, parameter: Tensor) -> None:
    """Let the head ask for codes in the order of a frame: drawn weights alone would hardly ever."""
    from mstar_tts.orpheus.tokens import FRAME, OrpheusTokens

    if folder:
        _codec_like(name, parameter)
        return
    tokens = OrpheusTokens()
    if name == "model.embed_tokens.weight":
        parameter[:, :FRAME] = 0
        parameter[tokens.before_speech[-1], FRAME - 1] = 100
        for place, (first, behind) in enumerate(tokens.ranges):
            parameter[first:behind, place] = 100
    elif name == "lm_head.weight":
        parameter[:, :FRAME] = -1
        for place, (first, behind) in enumerate(tokens.ranges):
            parameter[first:behind, (place - 1) % FRAME] = 4


# --- Qwen3-TTS -------------------------------------------------------------------------------------------------------
_TALKER = Shape(
    "talker",
    {
        **SHAPES["qwen3-0.6b"].config,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "vocab_size": 3072,
        "tie_word_embeddings": False,
    },
)
_PREDICTOR = Shape("predictor", {**_TALKER.config, "num_hidden_layers": 5, "vocab_size": 2048})


def _write_qwen3(folder: Path) -> None:
    """The tiny checkpoint's tokenizer and layout with the published sizes."""
    tiny = importlib.import_module("mstar_tts.qwen3_tts.tiny")
    tiny.write(folder, "custom_voice", "0b6", predictor_width=32)
    sizes = {
        name: _TALKER.config[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    names = ("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos")
    ids = dict(zip(names, (2148, 2149, 2150, 2154, 2155, 2156, 2157), strict=True))
    config = json.loads((folder / "config.json").read_text())
    talker = config["talker_config"]
    talker.update(
        {
            **sizes,
            "num_hidden_layers": 28,
            "rope_theta": 1_000_000,
            "vocab_size": 3072,
            "text_hidden_size": 2048,
            "text_vocab_size": 151_936,
            "rope_scaling": {"mrope_section": [24, 20, 20], "interleaved": True, "rope_type": "default"},
            "max_position_embeddings": 32_768,
            **{f"codec_{name}_id": number for name, number in ids.items()},
            "codec_language_id": {"english": 2050},
            "spk_id": {"vivian": 3065},
            "spk_is_dialect": {"vivian": False},
        }
    )
    talker["code_predictor_config"].update(
        {**sizes, "num_hidden_layers": 5, "vocab_size": 2048, "layer_types": ["full_attention"] * 5}
    )
    talker["code_predictor_config"]["rope_theta"] = 1_000_000
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "speech_tokenizer" / "config.json"
    codec = json.loads(file.read_text())
    codec["decoder_config"].update(
        codebook_size=2048, codebook_dim=512, hidden_size=512, latent_dim=1024, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=16, head_dim=64, intermediate_size=1024, sliding_window=72,
        decoder_dim=1536,
    )  # fmt: skip
    file.write_text(json.dumps(codec))


def _qwen3_like(folder: str, name: str, parameter: Tensor) -> None:
    if folder:
        _codec_like(name, parameter)
        if name.endswith("cluster_usage"):
            parameter.fill_(1)


# --- Kokoro ----------------------------------------------------------------------------------------------------------
_ISTFTNET = {
    "upsample_rates": [10, 6],
    "upsample_kernel_sizes": [20, 12],
    "upsample_initial_channel": 512,
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "gen_istft_n_fft": 20,
    "gen_istft_hop_size": 5,
}
_PLBERT = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 2048,
    "max_position_embeddings": 512,
    "num_hidden_layers": 12,
}


def _write_kokoro(folder: Path) -> None:
    from mstar_tts.kokoro.tiny import CONFIG, write_kokoro

    published = {"hidden_dim": 512, "style_dim": 128, "n_layer": 3, "n_mels": 80, "max_dur": 50}
    write_kokoro(folder, {**CONFIG, **published, "plbert": _PLBERT, "istftnet": _ISTFTNET})


_PHONEMES = "ðə kˈæt sˈæt ˌɑn ðə mˈæt, ænd sˈɔ ə bˈɜɹd ðæt flˈu ˌOvəɹ ðə hˈɪlz, fˈɑɹ əwˈA fɹʌm ˈɔl ʌv ðˈɛm. "


FAMILIES: dict[str, Family] = {
    "orpheus": Family(
        "orpheus",
        _write_orpheus,
        lambda seconds: {"ignore_eos": True, "max_tokens": 7 * max(3, math.ceil(seconds * 24_000 / 2048))},
        _speak_in_order,
        options={"max_tokens": 4096},
        streams=(1, 8, 32, 64, 100, 200),
        parts=((_ORPHEUS, 1),),
        steps_per_s=7 * 24_000 / 2048,
    ),
    "qwen3_tts": Family(
        "qwen3_tts",
        _write_qwen3,
        # the last one ends the answer and makes no sound
        lambda seconds: {"ignore_eos": True, "max_new_tokens": math.ceil(seconds * 12.5) + 1},
        _qwen3_like,
        options={"max_tokens": 4096},
        parts=((_TALKER, 1), (_PREDICTOR, 15)),
        steps_per_s=12.5,
    ),
    "kokoro": Family(
        "kokoro",
        _write_kokoro,
        # three frames of 25 ms a phoneme; the text itself is not read
        lambda seconds: {"phonemes": (_PHONEMES * math.ceil(seconds / 7 + 1))[: max(20, int(seconds * 13.3))]},
    ),
}


def tiny(family: Family) -> Family:
    """*family* as the tiny checkpoint that tests serve, with few streams."""
    from mstar_tts.plugin import mstar_models

    (spec,) = (spec for spec in mstar_models() if spec.key == family.key)
    module, _, name = str(spec.tiny).partition(":")

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        getattr(importlib.import_module(module), name)(folder)

    small = tuple((SHAPES["tiny"], times) for _, times in family.parts)
    return replace(family, write=write, edit=None, options={}, streams=(1, 3), parts=small)


def made(family: Family, folder: Path) -> Path:
    """A fresh *folder* with *family*'s checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    family.write(folder)
    return folder
