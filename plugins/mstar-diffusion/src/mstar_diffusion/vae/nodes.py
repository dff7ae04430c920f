"""The nodes of an autoencoder: pixels to a denoiser's tokens, and tokens to pixels.

Pictures of a step are encoded and decoded one by one: they may differ in size, one picture fills a device, and memory
is that of one. A family says how its tokens are cut and normalised.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn.node import Node, Step
from mstar.weights.names import WeightMap
from mstar_diffusion.vae.blocks import Decoder, Encoder
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.vae.tiles import decoded_in_tiles

__all__ = ["PREVIEW_SIDE", "Tiling", "VaeDecoder", "VaeEncoder", "to_pixels", "vae_weights"]

Tiling = Literal["auto", "always", "never"]

PREVIEW_SIDE = 32
"""Most latent points along a side of a preview: 256 pixels, a sixteenth of the work of 1024."""

_MAPS = 10
"""Full-size feature maps, as wide as the second size, that a decode holds at its peak: 5 GiB at 1024 x 1024 in
bfloat16, for FLUX's decoders."""


class VaeEncoder(Node, abc.ABC):
    """Pictures as a denoiser's tokens."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.encoder = Encoder(3, config.latent, config.widths, config.layers, config.groups, config.attention)
        self.quant_conv = nn.Conv2d(2 * config.latent, 2 * config.latent, 1) if config.quant else None

    def forward(self, step: Step, pixels: list[Tensor]) -> dict[str, Any]:
        """*pixels*: uint8 ``[H, W, 3]`` each. Returns ``condition``: of each ``[h, w, C]``."""
        return {"condition": [self.tokens(self.encode(picture, step.dtype))[0] for picture in pixels]}

    def encode(self, picture: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean ``[1, latent, H/f, W/f]`` of what *picture* ``[H, W, 3]`` may be."""
        # channels last in memory, on the CPU too: a picture comes so, and the reference leaves it so
        x = (picture[None].permute(0, 3, 1, 2).float() / 255 * 2 - 1).to(dtype)
        moments = self.encoder(x)
        if self.quant_conv is not None:
            moments = self.quant_conv(moments)
        return moments.chunk(2, 1)[0]  # type: ignore[no-any-return]

    @abc.abstractmethod
    def tokens(self, latent: Tensor) -> Tensor:
        """``[1, latent, h, w]`` as the denoiser's ``[1, h', w', C]``."""


class VaeDecoder(Node, abc.ABC):
    """A denoiser's tokens as pictures.

    :param tiling: whether pictures are decoded in tiles; ``auto``: where the device has not enough free memory for a
        whole one. :param tile: a tile's side in pixels. :param compiled: whether ``engine.compile`` compiles it too.
    """

    def __init__(self, config: VaeConfig, tiling: Tiling = "auto", tile: int = 512, compiled: bool = True):
        super().__init__()
        self.config, self.tiling, self.tile, self.compiled = config, tiling, tile, compiled
        self.decoder = Decoder(3, config.latent, config.decoder_widths, config.layers, config.groups, config.attention)
        self.post_quant_conv = nn.Conv2d(config.latent, config.latent, 1) if config.post_quant else None

    def forward(self, step: Step, latent: list[Tensor]) -> dict[str, Any]:
        """*latent*: of each row ``[h', w', C]``. Returns ``image``: uint8 ``[1, H, W, 3]`` of each."""
        return {"image": [to_pixels(self.decode(self.latents(row[None].to(step.dtype)))) for row in latent]}

    def preview(self, step: Step, clean: list[Tensor]) -> dict[str, Any]:
        """*clean*: of each row what the picture would be now, ``[h', w', C]``. Returns ``preview``: uint8
        ``[1, H, W, 3]``, at most :data:`PREVIEW_SIDE` latent points large."""
        seen = []
        for row in clean:
            latent = self.latents(row[None].to(step.dtype))
            scale = min(1.0, PREVIEW_SIDE / max(latent.shape[2:]))
            size = (max(1, round(latent.shape[2] * scale)), max(1, round(latent.shape[3] * scale)))
            small = F.adaptive_avg_pool2d(latent, size) if scale < 1 else latent
            seen.append(to_pixels(self.whole(small)))
        return {"preview": seen}

    @abc.abstractmethod
    def latents(self, tokens: Tensor) -> Tensor:
        """``[1, h', w', C]`` as the autoencoder's ``[1, latent, h, w]``."""

    def decode(self, latent: Tensor) -> Tensor:
        """``[1, latent, h, w]`` to ``[1, 3, h * f, w * f]``, whole or in tiles."""
        factor = self.config.factor
        side = max(1, self.tile // factor)
        if max(latent.shape[2:]) > side and self._in_tiles(latent):
            return decoded_in_tiles(self.whole, latent, side, factor)
        return self.whole(latent)

    def whole(self, latent: Tensor) -> Tensor:
        if latent.is_cuda:
            latent = latent.contiguous(memory_format=torch.channels_last)
        if self.post_quant_conv is not None:
            latent = self.post_quant_conv(latent)
        return self.decoder(latent)  # type: ignore[no-any-return]

    def _in_tiles(self, latent: Tensor) -> bool:
        if self.tiling != "auto":
            return self.tiling == "always"
        if not latent.is_cuda:
            return False
        free, _ = torch.cuda.mem_get_info(latent.device)
        held = torch.cuda.memory_reserved(latent.device) - torch.cuda.memory_allocated(latent.device)
        return self.bytes_of(latent) > free + held

    def bytes_of(self, latent: Tensor) -> int:
        """About what decoding *latent* whole needs at its peak."""
        pixels = latent.shape[2] * latent.shape[3] * self.config.factor**2
        widest = max(self.config.decoder_widths[:2])
        return pixels * widest * _MAPS * latent.dtype.itemsize

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        if self.compiled:
            yield "decoder", self.decoder


def to_pixels(picture: Tensor) -> Tensor:
    """``[rows, 3, H, W]`` in -1…1 to uint8 ``[rows, H, W, 3]``."""
    return ((picture / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float() * 255).round().to(torch.uint8)


def vae_weights(module: nn.Module) -> WeightMap:
    """Names as diffusers publishes them in the folder ``vae``; what belongs to the other node is left to it."""
    ignore = [rf"{part}\..*" for part in ("encoder", "decoder", "quant_conv", "post_quant_conv", "bn")]
    return WeightMap.from_module(module, ignore=tuple(ignore), float32=(r"bn\..*",), folder="vae")
