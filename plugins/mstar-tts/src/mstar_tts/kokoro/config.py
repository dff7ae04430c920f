"""Kokoro's sizes, from the ``config.json`` that its weights are published with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mstar.spec.errors import WeightsError

__all__ = ["RATE", "AlbertConfig", "KokoroConfig", "VocoderConfig"]

RATE = 24_000
"""Samples a second of all Kokoro models."""


@dataclass(frozen=True)
class AlbertConfig:
    """PL-BERT: an ALBERT over phonemes. *embedding*: width of its factorised embeddings."""

    hidden: int
    heads: int
    intermediate: int
    layers: int
    positions: int
    embedding: int = 128
    eps: float = 1e-12


@dataclass(frozen=True)
class VocoderConfig:
    """The iSTFTNet decoder.

    :param width: channels of the blocks before the generator, and :param text: of the text features beside them. They
        are not in the published config, where they always are 1024 and 64.
    :param channels: of the generator's input; each upsampling halves them. :param dilations: one list a kernel.
    """

    channels: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    block_kernels: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]
    n_fft: int
    hop: int
    width: int = 1024
    text: int = 64

    @property
    def f0_samples(self) -> int:
        """Samples of sound that one value of the pitch curve lasts."""
        return prod(self.rates) * self.hop


@dataclass(frozen=True)
class KokoroConfig:
    """:param vocab: phoneme → id. :param max_duration: the most frames of one phoneme, at speed 1."""

    vocab: Mapping[str, int]
    tokens: int
    hidden: int
    style: int
    layers: int
    kernel: int
    max_duration: int
    albert: AlbertConfig
    vocoder: VocoderConfig

    @property
    def frame_samples(self) -> int:
        """Samples of sound of one frame, the unit of durations; the pitch curve has two values a frame."""
        return 2 * self.vocoder.f0_samples

    @property
    def max_phonemes(self) -> int:
        """Phonemes that fit between the two marks at a text's ends."""
        return self.albert.positions - 2

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> KokoroConfig:
        """:raises WeightsError: a key is missing, or holds what no Kokoro has."""
        try:
            return cls._read(config)
        except KeyError as error:
            raise WeightsError(f"config.json is not that of a Kokoro model: it has no {error}") from error
        except (TypeError, ValueError) as error:
            raise WeightsError(f"config.json is not that of a Kokoro model: {type(error).__name__}: {error}") from error

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> KokoroConfig:
        bert, net = config["plbert"], config["istftnet"]
        vocoder = VocoderConfig(
            channels=int(net["upsample_initial_channel"]),
            rates=tuple(map(int, net["upsample_rates"])),
            kernels=tuple(map(int, net["upsample_kernel_sizes"])),
            block_kernels=tuple(map(int, net["resblock_kernel_sizes"])),
            block_dilations=tuple(tuple(map(int, row)) for row in net["resblock_dilation_sizes"]),
            n_fft=int(net["gen_istft_n_fft"]),
            hop=int(net["gen_istft_hop_size"]),
            width=int(net.get("decoder_width", 1024)),
            text=int(net.get("decoder_text_width", 64)),
        )
        for rate, kernel in zip(vocoder.rates, vocoder.kernels, strict=True):
            if kernel % rate or (kernel - rate) % 2:
                raise ValueError(f"an upsampling by {rate} with a kernel of {kernel}")
        if vocoder.n_fft % vocoder.hop:
            raise ValueError(f"an n_fft of {vocoder.n_fft} with a hop of {vocoder.hop}")
        return cls(
            vocab={str(symbol): int(token) for symbol, token in config["vocab"].items()},
            tokens=int(config["n_token"]),
            hidden=int(config["hidden_dim"]),
            style=int(config["style_dim"]),
            layers=int(config["n_layer"]),
            kernel=int(config["text_encoder_kernel_size"]),
            max_duration=int(config["max_dur"]),
            albert=AlbertConfig(
                hidden=int(bert["hidden_size"]),
                heads=int(bert["num_attention_heads"]),
                intermediate=int(bert["intermediate_size"]),
                layers=int(bert["num_hidden_layers"]),
                positions=int(bert["max_position_embeddings"]),
                embedding=int(bert.get("embedding_size", 128)),
                eps=float(bert.get("layer_norm_eps", 1e-12)),
            ),
            vocoder=vocoder,
        )
