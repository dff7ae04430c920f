"""Sizes of the 12 Hz codec, from the ``speech_tokenizer/config.json`` that it is published with, and of the speaker
encoder, from the model's own ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from mstar.spec.errors import WeightsError
from mstar_tts.seanet_config import SeanetConfig

__all__ = ["FOLDER", "CodecConfig", "DecoderConfig", "EncoderConfig", "SpeakerConfig", "TransformerConfig"]

FOLDER = "speech_tokenizer"
"""Where the codec's files lie below the model's."""

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class TransformerConfig:
    """Layers in the middle of either half.

    :param window: frames that an item sees, itself included; ``None``: all before it.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    theta: float
    bias: bool
    window: int | None


@dataclass(frozen=True)
class DecoderConfig:
    """From codes to sound.

    :param width: of a frame's vector, of which each codebook has half. :param latent: around the transformer.
    :param repeats: upsampling before the vocoder. :param rates: the vocoder's; each halves its *channels*.
    """

    codebook: int
    codebooks: int
    width: int
    latent: int
    channels: int
    repeats: tuple[int, ...]
    rates: tuple[int, ...]
    transformer: TransformerConfig

    @property
    def frame_samples(self) -> int:
        return prod(self.repeats) * prod(self.rates)


@dataclass(frozen=True)
class EncoderConfig:
    """From sound to codes: a Mimi encoder.

    :param down: how many items of the transformer become a frame. :param width: of the residual quantisers.
    :param codebooks: those that the checkpoint has; :param used: those whose codes are taken.
    """

    convolutions: SeanetConfig
    down: int
    codebook: int
    codebook_dim: int
    width: int
    semantic: int
    codebooks: int
    used: int
    transformer: TransformerConfig

    @property
    def frame_samples(self) -> int:
        return prod(self.convolutions.ratios) * self.down


@dataclass(frozen=True)
class CodecConfig:
    """:param rate: samples a second, in and out."""

    rate: int
    decoder: DecoderConfig
    encoder: EncoderConfig

    @property
    def samples_per_frame(self) -> int:
        return self.decoder.frame_samples

    @property
    def groups(self) -> int:
        """Codes of one frame."""
        return self.decoder.codebooks

    @property
    def codebook_size(self) -> int:
        """Values of one code."""
        return self.decoder.codebook

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> CodecConfig:
        """From the contents of the codec's ``config.json``.

        :raises WeightsError: a key is missing, or holds what no such codec has.
        """
        return _checked(cls._read, config, f"{FOLDER}/config.json")

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> CodecConfig:
        rates = {int(config.get(f"{side}_sample_rate", 24_000)) for side in ("input", "output")}
        if len(rates) != 1:
            raise ValueError(f"one rate in and another out: {sorted(rates)}")
        decoder = _decoder(config["decoder_config"])
        encoder = _encoder(config["encoder_config"], int(config.get("encoder_valid_num_quantizers", 16)))
        for key, samples in (
            ("decode_upsample_rate", decoder.frame_samples),
            ("encode_downsample_rate", encoder.frame_samples),
        ):
            if int(config.get(key, 1920)) != samples:
                raise ValueError(f"{key} is {config.get(key, 1920)}, but a frame has {samples} samples")
        if encoder.used != decoder.codebooks:
            raise ValueError(f"{encoder.used} codes a frame are encoded and {decoder.codebooks} decoded")
        return cls(rates.pop(), decoder, encoder)


@dataclass(frozen=True)
class SpeakerConfig:
    """The ECAPA-TDNN. The last of *channels*, *kernels* and *dilations* are those of what joins the blocks."""

    mels: int
    width: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention: int
    scale: int
    squeeze: int
    rate: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> SpeakerConfig:
        """From the model's ``speaker_encoder_config``.

        :raises WeightsError: a key holds what no such encoder has.
        """
        return _checked(cls._read, config, "config.json")

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> SpeakerConfig:
        channels = _numbers(config, "enc_channels", (512, 512, 512, 512, 1536))
        kernels = _numbers(config, "enc_kernel_sizes", (5, 3, 3, 3, 1))
        dilations = _numbers(config, "enc_dilations", (1, 2, 3, 4, 1))
        if not len(channels) == len(kernels) == len(dilations) >= 3:
            raise ValueError("enc_channels, enc_kernel_sizes and enc_dilations are not equally long")
        if channels[-1] != sum(channels[1:-1]):
            raise ValueError(f"the last of enc_channels, {channels[-1]}, is not the sum of those of the blocks")
        return cls(
            mels=int(config.get("mel_dim", 128)),
            width=int(config.get("enc_dim", 1024)),
            channels=channels,
            kernels=kernels,
            dilations=dilations,
            attention=int(config.get("enc_attention_channels", 128)),
            scale=int(config.get("enc_res2net_scale", 8)),
            squeeze=int(config.get("enc_se_channels", 128)),
            rate=int(config.get("sample_rate", 24_000)),
        )


def _checked(read: Callable[[Mapping[str, Any]], _Read], config: Mapping[str, Any], file: str) -> _Read:
    try:
        return read(config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise WeightsError(f"{file} is not that of a Qwen3-TTS model at 12 Hz: {what}") from error


def _numbers(config: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    numbers = tuple(map(int, config.get(key) or default))
    if min(numbers) < 1:
        raise ValueError(f"{key} has {min(numbers)}")
    return numbers


def _rope(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported")
    return float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))


def _activation(config: Mapping[str, Any], wanted: str) -> None:
    if config.get("hidden_act", wanted) != wanted:
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; {wanted!r} is")


def _decoder(config: Mapping[str, Any]) -> DecoderConfig:
    _activation(config, "silu")
    hidden, heads = int(config.get("hidden_size", 1024)), int(config.get("num_attention_heads", 16))
    channels, rates = int(config.get("decoder_dim", 1536)), _numbers(config, "upsample_rates", (8, 5, 4, 3))
    if channels % 2 ** len(rates):
        raise ValueError(f"decoder_dim {channels} cannot be halved {len(rates)} times")
    width = int(config["codebook_dim"])
    if width % 2:
        raise ValueError(f"codebook_dim {width} is odd")
    return DecoderConfig(
        codebook=int(config.get("codebook_size", 2048)),
        codebooks=int(config.get("num_quantizers", 16)),
        width=width,
        latent=int(config.get("latent_dim", 1024)),
        channels=channels,
        repeats=_numbers(config, "upsampling_ratios", (2, 2)),
        rates=rates,
        transformer=TransformerConfig(
            hidden=hidden,
            layers=int(config.get("num_hidden_layers", 8)),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", 16)),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config.get("intermediate_size", 3072)),
            eps=float(config.get("rms_norm_eps", 1e-5)),
            theta=_rope(config),
            bias=bool(config.get("attention_bias", False)),
            window=int(config.get("sliding_window", 72)),
        ),
    )


def _encoder(config: Mapping[str, Any], used: int) -> EncoderConfig:
    """The reference's encoder is transformers' Mimi, whose attention sees all that came before, whatever its
    ``sliding_window`` says (transformers 4.57.3, which the reference asks for)."""
    _activation(config, "gelu")
    for key, wanted in (("audio_channels", 1), ("use_causal_conv", True), ("pad_mode", "constant")):
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} {config[key]!r} is not supported; {wanted!r} is")
    hidden, heads = int(config.get("hidden_size", 512)), int(config.get("num_attention_heads", 8))
    ratios = _numbers(config, "upsampling_ratios", (8, 6, 5, 4))
    rate = int(config.get("sampling_rate", 24_000))
    before = -(-rate // prod(ratios))
    after = float(config.get("frame_rate") or rate / (2 * prod(ratios)))
    down = int(before / after)
    if down != 2:
        raise ValueError(f"frames of {after} Hz out of {before} Hz; only a half is supported")
    codebooks, semantic = int(config.get("num_quantizers", 32)), int(config.get("num_semantic_quantizers", 1))
    if not 1 <= semantic < used <= codebooks:
        raise ValueError(f"{used} of {codebooks} codes a frame are used, {semantic} of them semantic")
    return EncoderConfig(
        convolutions=SeanetConfig(
            filters=int(config.get("num_filters", 64)),
            width=hidden,
            ratios=ratios[::-1],
            residuals=int(config.get("num_residual_layers", 1)),
            kernel=int(config.get("kernel_size", 7)),
            last_kernel=int(config.get("last_kernel_size", 3)),
            residual_kernel=int(config.get("residual_kernel_size", 3)),
            growth=int(config.get("dilation_growth_rate", 2)),
            compress=int(config.get("compress", 2)),
            shortcut=bool(config.get("use_conv_shortcut", False)),
        ),
        down=down,
        codebook=int(config.get("codebook_size", 2048)),
        codebook_dim=int(config.get("codebook_dim") or hidden),
        width=int(config.get("vector_quantization_hidden_dimension", 256)),
        semantic=semantic,
        codebooks=codebooks,
        used=used,
        transformer=TransformerConfig(
            hidden=hidden,
            layers=int(config.get("num_hidden_layers", 8)),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads", 8)),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config.get("intermediate_size", 2048)),
            eps=float(config.get("norm_eps", 1e-5)),
            theta=_rope(config),
            bias=bool(config.get("attention_bias", False)),
            window=None,
        ),
    )
