"""FLUX.2's autoencoder: 2 x 2 points are one token, normalised by the running statistics of a batch norm.

Source: diffusers 0.42.1, ``AutoencoderKLFlux2`` and its use in ``pipelines/flux2/pipeline_flux2_klein.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mstar_diffusion.dit.patches import channels_first, from_channels_first
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.vae.nodes import Tiling, VaeDecoder, VaeEncoder

__all__ = ["Flux2VaeDecoder", "Flux2VaeEncoder"]

_PATCH = 2


class Statistics(nn.Module):
    """Mean and variance of each of a token's numbers, under the names of a batch norm's buffers; float32."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.eps = config.statistics_eps
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(_PATCH * _PATCH * config.latent))

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation in the dtype of *tokens*."""
        return self.running_mean.to(tokens.dtype), torch.sqrt(self.running_var + self.eps).to(tokens.dtype)


class Flux2VaeEncoder(VaeEncoder):
    def __init__(self, config: VaeConfig):
        super().__init__(config)
        self.bn = Statistics(config)

    def tokens(self, latent: Tensor) -> Tensor:
        tokens = channels_first(latent, _PATCH)
        mean, deviation = self.bn.of(tokens)
        return (tokens - mean) / deviation


class Flux2VaeDecoder(VaeDecoder):
    def __init__(self, config: VaeConfig, tiling: Tiling = "auto", tile: int = 512, compiled: bool = True):
        super().__init__(config, tiling, tile, compiled)
        self.bn = Statistics(config)

    def latents(self, tokens: Tensor) -> Tensor:
        mean, deviation = self.bn.of(tokens)
        return from_channels_first(tokens * deviation + mean, _PATCH)
