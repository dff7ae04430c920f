"""A tiny random FLUX.2 [klein] (`python -m mstar_diffusion.flux2.tiny FOLDER`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mstar_diffusion.flux2.model import Flux2Klein
from mstar_diffusion.flux2.spec import Flux2Options
from mstar_diffusion.tiny import TEXT_HIDDEN, write_pipeline

__all__ = ["TRANSFORMER", "VAE", "write"]

TRANSFORMER: dict[str, Any] = {
    "_class_name": "Flux2Transformer2DModel",
    "patch_size": 1,
    "in_channels": 16,
    "out_channels": None,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * TEXT_HIDDEN,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [4, 4, 4, 4],
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLFlux2",
    "act_fn": "silu",
    "batch_norm_eps": 1e-4,
    "batch_norm_momentum": 0.1,
    "block_out_channels": [8, 8, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "mid_block_add_attention": True,
    "norm_num_groups": 4,
    "out_channels": 3,
    "patch_size": [2, 2],
    "sample_size": 64,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": True,
    "use_quant_conv": True,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
_CLASSES: dict[str, Any] = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": True,
    "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    "text_encoder": "transformers.Qwen3ForCausalLM",
    "tokenizer": "transformers.PreTrainedTokenizerFast",
    "transformer": "diffusers.Flux2Transformer2DModel",
    "vae": "diffusers.AutoencoderKLFlux2",
}


def write(folder: Path) -> None:
    """Write the parts of a [klein] pipeline into *folder*."""
    configs = {"transformer": TRANSFORMER, "vae": VAE, "scheduler": SCHEDULER}
    write_pipeline(folder, Flux2Klein, Flux2Options(), configs, _CLASSES)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
