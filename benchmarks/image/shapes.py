"""Models of pictures at their published shapes: configurations, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_diffusion.flux2 import tiny as flux2_tiny
from mstar_diffusion.z_image import tiny as z_image_tiny

__all__ = ["SHAPES", "Shape", "write_shape"]

_QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
_QWEN3 = {"num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_WIDE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 1024}
_KLEIN = {"in_channels": 128, "attention_head_dim": 128, "axes_dims_rope": [32] * 4, "timestep_guidance_channels": 256}


@dataclass(frozen=True)
class Shape:
    """One model. *changes*: part → what is different from the tiny checkpoint's configuration.

    :param steps: its own number of steps. :param size: side of the pictures that are measured.
    """

    key: str
    steps: int
    size: int
    changes: Mapping[str, Mapping[str, Any]]

    @property
    def flux2(self) -> bool:
        return self.key.startswith("flux2")


SHAPES = {
    "z-image": Shape(
        "z_image_turbo",
        8,
        1024,
        {
            "transformer": {
                "in_channels": 16,
                "dim": 3840,
                "n_layers": 30,
                "n_refiner_layers": 2,
                "n_heads": 30,
                "n_kv_heads": 30,
                "cap_feat_dim": 2560,
                "axes_dims": [32, 48, 48],
                "axes_lens": [1536, 512, 512],
            },
            "vae": {**_WIDE, "latent_channels": 16},
            "text_encoder": {**_QWEN3, **_QWEN3_4B},
        },
    ),
    "klein-4b": Shape(
        "flux2_klein",
        4,
        1024,
        {
            "transformer": {
                **_KLEIN,
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
            },
            "vae": {**_WIDE, "latent_channels": 32},
            "text_encoder": {**_QWEN3, **_QWEN3_4B},
        },
    ),
    "klein-9b": Shape(
        "flux2_klein",
        4,
        1024,
        {
            "transformer": {
                **_KLEIN,
                "num_layers": 8,
                "num_single_layers": 24,
                "num_attention_heads": 32,
                "joint_attention_dim": 12288,
            },
            "vae": {**_WIDE, "latent_channels": 32},
            "text_encoder": {**_QWEN3, **_QWEN3_8B},
        },
    ),
    "tiny": Shape("flux2_klein", 2, 64, {}),
    "tiny-z-image": Shape("z_image_turbo", 2, 64, {}),
}


def write_shape(shape: Shape, folder: Path) -> None:
    """Write the repository of *shape* into *folder*: everything but the weights, whose tiny files stand for them."""
    (flux2_tiny if shape.flux2 else z_image_tiny).write(folder)
    for part, change in shape.changes.items():
        file = folder / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}, indent=2))
