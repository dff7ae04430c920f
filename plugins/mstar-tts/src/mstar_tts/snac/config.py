"""What a published SNAC says of itself. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.spec.errors import SetupError

__all__ = ["SnacConfig"]


@dataclass(frozen=True)
class SnacConfig:
    """Sizes of the decoding half.

    :param rate: of the sound, in Hz. :param latent: width between quantiser and decoder.
    :param channels: width of the decoder's first stage; each stage halves it. :param rates: how much each upsamples.
    :param codes: entries of each codebook, of width *code_width*. :param strides: latent frames that a code of each
        codebook lasts, the coarsest first.
    """

    rate: int
    latent: int
    channels: int
    rates: tuple[int, ...]
    codes: int
    code_width: int
    strides: tuple[int, ...]
    noise: bool
    depthwise: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str = "config.json") -> SnacConfig:
        """From the contents of the ``config.json`` beside the weights.

        :raises SetupError: a key is missing, or says what this decoder does not compute; names both.
        """
        try:
            down = config["encoder_rates"]
            latent = config.get("latent_dim") or config["encoder_dim"] * 2 ** len(down)
            found = cls(
                rate=int(config["sampling_rate"]),
                latent=int(latent),
                channels=int(config["decoder_dim"]),
                rates=tuple(map(int, config["decoder_rates"])),
                codes=int(config["codebook_size"]),
                code_width=int(config.get("codebook_dim", 8)),
                strides=tuple(map(int, config["vq_strides"])),
                noise=bool(config.get("noise", True)),
                depthwise=bool(config.get("depthwise", True)),
            )
        except KeyError as error:
            raise SetupError(f"{where}: {error.args[0]} is missing") from None
        except (TypeError, ValueError) as error:
            raise SetupError(f"{where} is no SNAC's: {error}") from None
        if config.get("attn_window_size") is not None:
            raise SetupError(f"{where}: attn_window_size is set; only SNACs without attention are supported")
        coarsest = found.strides[0] if found.strides else 0
        if not coarsest or any(coarsest % stride for stride in found.strides):
            raise SetupError(f"{where}: vq_strides {found.strides} do not divide each other")
        if found.noise and any(rate % 2 for rate in found.rates):
            raise SetupError(f"{where}: decoder_rates {found.rates}: a SNAC with noise needs even ones")
        return found

    @property
    def hop(self) -> int:
        """Samples of a latent frame."""
        return math.prod(self.rates)

    @property
    def frame_samples(self) -> int:
        return self.strides[0] * self.hop
