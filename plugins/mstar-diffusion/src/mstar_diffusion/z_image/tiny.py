"""A tiny random Z-Image (`python -m mstar_diffusion.z_image.tiny FOLDER`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstar_diffusion.tiny import TEXT_HIDDEN, write_pipeline
from mstar_diffusion.vae.blocks import Encoder
from mstar_diffusion.vae.config import VaeConfig
from mstar_diffusion.z_image.model import ZImage
from mstar_diffusion.z_image.spec import ZImageOptions

__all__ = ["TRANSFORMER", "VAE", "write"]

TRANSFORMER: dict[str, Any] = {
    "_class_name": "ZImageTransformer2DModel",
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": TEXT_HIDDEN,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1024, 64, 64],
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": True,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "mid_block_add_attention": True,
    "norm_num_groups": 4,
    "out_channels": 3,
    "sample_size": 64,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}
_CLASSES = {
    "_class_name": "ZImagePipeline",
    "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    "text_encoder": "transformers.Qwen3Model",
    "tokenizer": "transformers.PreTrainedTokenizerFast",
    "transformer": "diffusers.ZImageTransformer2DModel",
    "vae": "diffusers.AutoencoderKL",
}


def write(folder: Path, **transformer: Any) -> None:
    """Write the parts of a Z-Image pipeline into *folder*. *transformer*: other sizes of its denoiser."""
    configs = {"transformer": TRANSFORMER | transformer, "vae": VAE, "scheduler": SCHEDULER}
    vae = VaeConfig.read(VAE)
    with torch.device("meta"):
        encoder = Encoder(3, vae.latent, vae.widths, vae.layers, vae.groups)
    beside = {"vae": nn.ModuleDict({"encoder": encoder})}
    write_pipeline(folder, ZImage, ZImageOptions(), configs, _CLASSES, beside)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
