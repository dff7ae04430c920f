"""The nodes of an autoencoder: pixels to a denoiser's tokens, and tokens to pixels.

References are encoded one by one, since they differ in size. Pictures of one size are decoded together, as many as fit
into memory at a time; on the CPU one by one, where more gain nothing and each has the same bits in any step. A family
says how its tokens are cut and normalised.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.node import Node, Sampled, Step
from mstar.spec.sizes import bytes_in_words
from mstar.weights.names import WeightMap
from mstar_diffusion.rows import row_by_row
from mstar_diffusion.vae.blocks import Decoder, Encoder
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.vae.tiles import decoded_in_tiles

__all__ = ["PREVIEW_SIDE", "Tiling", "VaeDecoder", "VaeEncoder", "to_pixels", "vae_weights"]

Tiling = Literal["auto", "always", "never"]

PREVIEW_SIDE = 32
"""Most latent points along a side of a preview: 256 pixels, a sixteenth of the work of 1024."""

_MAPS = 10
"""Full-size feature maps, as wide as the second size, that a decode holds at its peak with PyTorch's norms, which turn
maps around, or compiled: 5 GiB at 1024 x 1024 in bfloat16, for FLUX's decoders."""

_SPARE = 1.1
"""Of what fused norms leave (1.4 GiB there, as measured): workspaces, and what an allocator cannot use."""

_KEPT = 8
"""A captured step keeps what it needs: at most one part in so many of the memory that is free. Larger ones, in which a
launch counts for nothing, run as plain calls."""


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

    def forward(self, step: Step, latent: Tensor) -> dict[str, Any]:
        """*latent*: ``[rows, h', w', C]``. Returns ``image``: uint8 ``[rows, H, W, 3]``, and ``finite``, which fails
        the requests whose pictures are no numbers: bytes would not show it.

        :raises RuntimeError: a captured step would hold too much memory; the engine goes on with plain calls.
        """
        points = self.latents(latent.to(step.dtype))
        room = math.inf if _recorded(step) else self.room(points)
        picture = self.decode(points, room)
        image = to_pixels(picture)
        if step.lane is not None and step.lane.trial and self.bytes_of(points) > room / _KEPT:
            size = f"{len(image)} of {image.shape[2]} x {image.shape[1]} pixels"
            raise RuntimeError(f"{size} would hold {bytes_in_words(self.bytes_of(points))} of memory")
        finite = picture.isfinite().flatten(1).all(1)
        return {"image": image, "finite": Sampled(finite.long() - 1)}

    def preview(self, step: Step, clean: Tensor) -> dict[str, Any]:
        """*clean*: what the pictures would be now, ``[rows, h', w', C]``. Returns ``preview``: uint8 ``[rows, H, W,
        3]``, at most :data:`PREVIEW_SIDE` latent points large."""
        points = self.latents(clean.to(step.dtype))
        scale = min(1.0, PREVIEW_SIDE / max(points.shape[2:]))
        size = (max(1, round(points.shape[2] * scale)), max(1, round(points.shape[3] * scale)))
        small = row_by_row(lambda x: F.adaptive_avg_pool2d(x, size), points) if scale < 1 else points
        return {"preview": to_pixels(row_by_row(self.whole, small))}

    @abc.abstractmethod
    def latents(self, tokens: Tensor) -> Tensor:
        """``[rows, h', w', C]`` as the autoencoder's ``[rows, latent, h, w]``."""

    def decode(self, latent: Tensor, room: float = math.inf) -> Tensor:
        """``[rows, latent, h, w]`` to ``[rows, 3, h * f, w * f]``, whole or in tiles, with about *room* bytes."""
        factor = self.config.factor
        side = max(1, self.tile // factor)
        each = self.bytes_of(latent[:1])
        tiled = self.tiling == "always" or (self.tiling == "auto" and each > room)
        if tiled and max(latent.shape[2:]) > side:
            return torch.cat([decoded_in_tiles(self.whole, row, side, factor) for row in torch.split(latent, 1)])
        some = int(min(len(latent), max(1.0, room / each)))
        if some == len(latent):
            return row_by_row(self.whole, latent)
        return torch.cat([row_by_row(self.whole, rows) for rows in torch.split(latent, some)])

    def whole(self, latent: Tensor) -> Tensor:
        if latent.is_cuda:
            latent = latent.contiguous(memory_format=torch.channels_last)
        if self.post_quant_conv is not None:
            latent = self.post_quant_conv(latent)
        return self.decoder(latent)  # type: ignore[no-any-return]

    def room(self, latent: Tensor) -> float:
        """Bytes of memory that are free where *latent* is; on the CPU nobody counts them."""
        if not latent.is_cuda:
            return math.inf
        free, _ = torch.cuda.mem_get_info(latent.device)
        return free + torch.cuda.memory_reserved(latent.device) - torch.cuda.memory_allocated(latent.device)

    def bytes_of(self, latent: Tensor) -> int:
        """About what decoding all rows of *latent* whole needs at its peak."""
        pixels = len(latent) * latent.shape[2] * latent.shape[3] * self.config.factor**2
        fused = latent.is_cuda and ops.cuda_kernels_fault() is None and not self._is_compiled
        each = self.decoder.numbers_at_peak() * _SPARE if fused else max(self.config.decoder_widths[:2]) * _MAPS
        return int(pixels * each * latent.dtype.itemsize)

    @property
    def _is_compiled(self) -> bool:
        return "forward" in vars(self.decoder)  # as mstar.engine.compile leaves it

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        if self.compiled:
            yield "decoder", self.decoder


def _recorded(step: Step) -> bool:
    """Whether a captured graph is made of *step*: nothing may be asked of the device then."""
    return step.lane is not None and not step.lane.trial


def to_pixels(picture: Tensor) -> Tensor:
    """``[rows, 3, H, W]`` in -1…1 to uint8 ``[rows, H, W, 3]``."""
    return ((picture / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float() * 255).round().to(torch.uint8)


def vae_weights(module: nn.Module) -> WeightMap:
    """Names as diffusers publishes them in the folder ``vae``; what belongs to the other node is left to it."""
    ignore = [rf"{part}\..*" for part in ("encoder", "decoder", "quant_conv", "post_quant_conv", "bn")]
    return WeightMap.from_module(module, ignore=tuple(ignore), float32=(r"bn\..*",), folder="vae")
