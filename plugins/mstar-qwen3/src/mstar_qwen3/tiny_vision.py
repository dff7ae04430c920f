"""A vision tower of a few dozen channels for :mod:`mstar_qwen3.tiny`."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["config", "preprocessors", "tensors"]

HIDDEN, FFN, HEADS, LAYERS, SIDE = 32, 48, 2, 2, 6
PATCH, MERGE, PAIR = 4, 2, 2


def config(width: int) -> dict[str, Any]:
    """``vision_config``. *width*: of the language model."""
    return {
        "model_type": "qwen3_5_vision",
        "depth": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_heads": HEADS,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": PAIR,
        "out_hidden_size": width,
        "num_position_embeddings": SIDE**2,
        "hidden_act": "gelu_pytorch_tanh",
    }


def preprocessors() -> dict[str, dict[str, Any]]:
    """The two files about pictures and videos: of up to 64 embeddings, and of up to 96."""
    plain = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": PAIR,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    side = PATCH * MERGE
    return {
        "preprocessor_config.json": {**plain, "size": {"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2}},
        "video_preprocessor_config.json": {
            **plain,
            "size": {"shortest_edge": 4 * side**2, "longest_edge": 192 * side**2},
            "fps": 2,
            "min_frames": 4,
            "max_frames": 16,
        },
    }


def tensors(width: int) -> dict[str, torch.Tensor]:
    """Under their published names."""
    draw = torch.Generator().manual_seed(11)
    inner = HIDDEN * MERGE**2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (HIDDEN, 3, PAIR, PATCH, PATCH),
        "merger.linear_fc1": (inner, inner),
        "merger.linear_fc2": (width, inner),
    }
    norms = ["merger.norm"]
    for layer in range(LAYERS):
        own = f"blocks.{layer}."
        norms += [f"{own}norm1", f"{own}norm2"]
        shapes |= {
            f"{own}attn.qkv": (3 * HIDDEN, HIDDEN),
            f"{own}attn.proj": (HIDDEN, HIDDEN),
            f"{own}mlp.linear_fc1": (FFN, HIDDEN),
            f"{own}mlp.linear_fc2": (HIDDEN, FFN),
        }
    found = {"pos_embed.weight": torch.randn(SIDE**2, HIDDEN, generator=draw) * 0.5}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = torch.randn(shape, generator=draw) * 0.2
        found[f"{name}.bias"] = torch.randn(shape[0], generator=draw) * 0.2
    for name in norms:
        found[f"{name}.weight"] = 1 + torch.randn(HIDDEN, generator=draw) * 0.2
        found[f"{name}.bias"] = torch.randn(HIDDEN, generator=draw) * 0.2
    return {f"model.visual.{name}": tensor for name, tensor in found.items()}
