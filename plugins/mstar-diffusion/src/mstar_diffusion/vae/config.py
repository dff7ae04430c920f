"""The facts of an autoencoder, from its published ``vae/config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.spec.errors import SetupError, nearest

__all__ = ["VaeConfig"]

_KNOWN = frozenset(
    (
        "act_fn", "batch_norm_eps", "batch_norm_momentum", "block_out_channels", "decoder_block_out_channels",
        "down_block_types", "force_upcast", "in_channels", "latent_channels", "latents_mean", "latents_std",
        "layers_per_block", "mid_block_add_attention", "norm_num_groups", "out_channels", "patch_size", "sample_size",
        "scaling_factor", "shift_factor", "up_block_types", "use_post_quant_conv", "use_quant_conv"
    )
)  # fmt: skip
_FIXED: Mapping[str, Any] = {"act_fn": "silu", "in_channels": 3, "out_channels": 3, "latents_mean": None}
_BLOCKS = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}


@dataclass(frozen=True)
class VaeConfig:
    """Of diffusers' ``AutoencoderKL`` and ``AutoencoderKLFlux2``.

    :param widths: channels of the encoder at each size, the full one first. :param decoder_widths: of the decoder.
    :param quant: whether a 1 x 1 convolution follows the encoder, and *post_quant* whether one precedes the decoder.
    :param scaling, shift: a denoiser's latents are ``(encoded - shift) * scaling``.
    :param statistics_eps: of the batch norm whose running statistics normalise FLUX.2's latents.
    """

    latent: int
    widths: tuple[int, ...]
    decoder_widths: tuple[int, ...]
    layers: int
    groups: int
    attention: bool = True
    quant: bool = True
    post_quant: bool = True
    scaling: float = 1.0
    shift: float = 0.0
    statistics_eps: float = 1e-4

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> VaeConfig:
        """Raises :class:`SetupError` for what this autoencoder does not have."""
        for key in config:
            if key not in _KNOWN and not key.startswith("_"):
                raise SetupError(f"vae/config.json: {key!r} is not known{nearest(key, sorted(_KNOWN))}")
        for key, value in _FIXED.items():
            if config.get(key, value) != value:
                raise SetupError(f"vae/config.json: {key} {config[key]!r} is not supported; {value!r} is")
        for key, kind in _BLOCKS.items():
            if strange := [block for block in config.get(key, ()) if block != kind]:
                raise SetupError(f"vae/config.json: {key} {strange[0]!r} is not supported; {kind!r} is")
        widths = tuple(config["block_out_channels"])
        return cls(
            latent=int(config["latent_channels"]),
            widths=widths,
            decoder_widths=tuple(config.get("decoder_block_out_channels") or widths),
            layers=int(config.get("layers_per_block", 1)),
            groups=int(config.get("norm_num_groups", 32)),
            attention=bool(config.get("mid_block_add_attention", True)),
            quant=bool(config.get("use_quant_conv", True)),
            post_quant=bool(config.get("use_post_quant_conv", True)),
            scaling=float(config.get("scaling_factor") or 1.0),
            shift=float(config.get("shift_factor") or 0.0),
            statistics_eps=float(config.get("batch_norm_eps", 1e-4)),
        )

    @property
    def factor(self) -> int:
        """Pixels along a side of a latent point."""
        return 1 << len(self.widths) - 1
