"""A Whisper checkpoint's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.spec.errors import WeightsError
from mstar_asr.whisper.request import FRAMES

__all__ = ["WhisperConfig"]


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes as in ``config.json``. :param mels: bins of the spectrogram. :param positions: of the decoder's tokens."""

    mels: int
    hidden: int
    encoder_layers: int
    encoder_heads: int
    encoder_ffn: int
    decoder_layers: int
    decoder_heads: int
    decoder_ffn: int
    vocab: int
    positions: int

    SOURCE_POSITIONS = FRAMES // 2
    """What the encoder makes of a window: one position for each 20 ms."""

    @property
    def decoder_head_dim(self) -> int:
        return self.hidden // self.decoder_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> WhisperConfig:
        """From ``config.json``.

        :raises WeightsError: a number is missing, or the checkpoint is of a kind that was never published.
        """
        expected = {
            "max_source_positions": cls.SOURCE_POSITIONS,
            "activation_function": "gelu",
            "scale_embedding": False,
        }
        for key, value in expected.items():
            if config.get(key, value) != value:
                raise WeightsError(f"config.json: {key} is {config[key]!r}; Whisper is served with {value!r} only")
        try:
            return cls(
                mels=config["num_mel_bins"],
                hidden=config["d_model"],
                encoder_layers=config["encoder_layers"],
                encoder_heads=config["encoder_attention_heads"],
                encoder_ffn=config["encoder_ffn_dim"],
                decoder_layers=config["decoder_layers"],
                decoder_heads=config["decoder_attention_heads"],
                decoder_ffn=config["decoder_ffn_dim"],
                vocab=config["vocab_size"],
                positions=config["max_target_positions"],
            )
        except KeyError as missing:
            raise WeightsError(f"config.json lacks {missing}") from None
