"""The sizes of a checkpoint, from the ``config.json`` of either published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.nn.config import DecoderConfig
from mstar.spec.errors import SetupError

__all__ = ["AudioConfig", "Qwen3ASRConfig", "audio_tokens"]


@dataclass(frozen=True)
class AudioConfig:
    """The encoder's sizes.

    :param second: spectrogram frames that go through the convolutions together (100, a second).
    :param window: of these, how many see each other (8).
    :param channels: of the convolutions. :param width: of what comes out, the language model's.
    """

    mels: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    channels: int
    width: int
    second: int
    window: int


@dataclass(frozen=True)
class Qwen3ASRConfig:
    """:param original: the layout of the first release (``thinker.*``), without it that of transformers (``-hf``)."""

    audio: AudioConfig
    text: DecoderConfig
    audio_token: int
    original: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3ASRConfig:
        """:raises SetupError: a size is missing, or is one that this encoder does not have."""
        original = "thinker_config" in config
        found = config["thinker_config"] if original else config
        try:
            audio, text = found["audio_config"], dict(found["text_config"])
            token = int(found["audio_token_id"])
            second, window = 2 * int(audio["n_window"]), int(audio["n_window_infer"])
            sizes = AudioConfig(
                mels=int(audio["num_mel_bins"]),
                hidden=int(audio["d_model"]),
                layers=int(audio["encoder_layers"]),
                heads=int(audio["encoder_attention_heads"]),
                ffn=int(audio["encoder_ffn_dim"]),
                channels=int(audio["downsample_hidden_size"]),
                width=int(audio["output_dim"]),
                second=second,
                window=window // second,
            )
        except KeyError as error:
            raise SetupError(f"config.json: {error.args[0]} is missing") from None
        if window % second:
            raise SetupError(f"config.json: n_window_infer {window} is no multiple of twice n_window, {second}")
        if audio.get("activation_function", "gelu") != "gelu" or audio.get("scale_embedding", False):
            raise SetupError("config.json: audio_config must have activation_function 'gelu' and no scale_embedding")
        # the rotation is declared multimodal, but all of its axes are one in speech: it is the plain one
        rope = {"rope_type": "default", "rope_theta": _theta(text)}
        text |= {"model_type": "qwen3", "rope_parameters": rope, "rope_scaling": None}
        text.setdefault("tie_word_embeddings", bool(found.get("tie_word_embeddings", True)))
        decoder = DecoderConfig.from_hf(text)
        if decoder.hidden != sizes.width:
            raise SetupError(f"config.json: output_dim {sizes.width} is not the language model's {decoder.hidden}")
        return cls(sizes, decoder, token, original)


def _theta(text: Mapping[str, Any]) -> float:
    for name in ("rope_parameters", "rope_scaling"):
        if (text.get(name) or {}).get("rope_theta"):
            return float(text[name]["rope_theta"])
    return float(text.get("rope_theta") or 1e6)


def audio_tokens(frames: int, second: int) -> int:
    """Embeddings of a clip of *frames* spectrogram frames, each second of which has *second*."""
    whole, rest = divmod(frames, second)
    return whole * _halved(second) + _halved(rest)


def _halved(frames: int) -> int:
    """What three convolutions of stride 2 leave of *frames*."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
