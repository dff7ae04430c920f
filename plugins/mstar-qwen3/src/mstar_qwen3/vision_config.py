"""The vision tower's sizes, from a checkpoint's ``vision_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from mstar.spec.errors import SetupError

__all__ = ["VisionConfig"]


@dataclass(frozen=True)
class VisionConfig:
    """:param width: of an embedding, the language model's. :param side: of the table of positions, a square.
    :param merge: patches on the side of what becomes one embedding. :param pair: frames of a patch.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    width: int
    side: int
    patch: int
    merge: int
    pair: int
    channels: int
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def values(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.pair * self.patch**2

    @property
    def block(self) -> int:
        """Patches of an embedding."""
        return self.merge**2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], width: int) -> VisionConfig:
        """:param width: of the language model.
        :raises SetupError: a size is missing, or is one that this tower does not have.
        """
        try:
            positions = int(config["num_position_embeddings"])
            found = cls(
                layers=int(config["depth"]),
                hidden=int(config["hidden_size"]),
                heads=int(config["num_heads"]),
                intermediate=int(config["intermediate_size"]),
                width=int(config["out_hidden_size"]),
                side=isqrt(positions),
                patch=int(config.get("patch_size", 16)),
                merge=int(config.get("spatial_merge_size", 2)),
                pair=int(config.get("temporal_patch_size", 2)),
                channels=int(config.get("in_channels", 3)),
                theta=float((config.get("rope_parameters") or {}).get("rope_theta") or 10_000.0),
            )
        except KeyError as error:
            raise SetupError(f"config.json: vision_config.{error.args[0]} is missing") from None
        if config.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise SetupError("config.json: vision_config.hidden_act must be 'gelu_pytorch_tanh'")
        if config.get("deepstack_visual_indexes"):
            raise SetupError("config.json: vision_config.deepstack_visual_indexes is set, which is not supported")
        if found.side**2 != positions:
            raise SetupError(f"config.json: vision_config.num_position_embeddings {positions} is no square")
        if found.hidden % found.heads or found.head_dim % 4:
            raise SetupError(f"config.json: vision_config has {found.hidden} channels for {found.heads} heads")
        if found.width != width:
            raise SetupError(f"config.json: vision_config.out_hidden_size {found.width} is not the text's {width}")
        return found
