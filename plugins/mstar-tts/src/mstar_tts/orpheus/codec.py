"""The node that turns windows of Orpheus' tokens into sound."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mstar.nn.node import Node, Step
from mstar_tts.orpheus.tokens import FRAME, LEVELS, OrpheusTokens
from mstar_tts.snac.config import SnacConfig
from mstar_tts.snac.decoder import SnacDecoder

__all__ = ["Codec"]


class Codec(SnacDecoder, Node):
    """:param frames: by the frames of a window, how many of them are asked for; all of those that are not named.
    :param dtype: what is computed in."""

    def __init__(self, config: SnacConfig, tokens: OrpheusTokens, frames: Mapping[int, int], dtype: torch.dtype):
        super().__init__(config)
        self.tokens, self.frames, self.dtype = tokens, frames, dtype

    def forward(  # type: ignore[override]
        self, step: Step, codes: Tensor, left: Tensor, key: Tensor, offset: Tensor
    ) -> dict[str, Tensor]:
        """*codes*: ids, int64 ``[rows, frames * 7]``. *left*, *offset*: tokens in the window that were heard before,
        and before the window. Returns `samples` float32 in -1…1, which begin with the first new frame."""
        places = codes.view(codes.shape[0], -1, FRAME) - self.tokens.first_code
        codes = places - torch.arange(FRAME, device=places.device) * self.tokens.codes
        codes = codes.clamp(0, self.tokens.codes - 1)  # graphs are captured with zeros in the place of tokens
        levels = [torch.stack([codes[:, :, place] for place in level], 2).flatten(1) for level in LEVELS]
        asked = self.frames.get(places.shape[1], places.shape[1])
        sound = super().forward(levels, key, offset // FRAME, left // FRAME, asked)
        return {"samples": sound}
