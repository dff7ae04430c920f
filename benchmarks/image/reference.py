"""diffusers at the shape of a checkpoint, eager and compiled: what the engine's pictures are compared with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from image.engine import PROMPT, memory, rates
from image.nodes import place
from image.random_weights import draw
from image.shapes import Shape

__all__ = ["diffusers", "reference_pipeline"]


def reference_pipeline(shape: Shape, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline of *shape* with random weights on *device*; tokenizer and configurations are those of *folder*."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
    from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
    from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
    from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
    from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    def config(part: str, name: str = "config.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / part / name).read_text())
        return found

    kinds: tuple[Any, Any] = (
        (Flux2Transformer2DModel, AutoencoderKLFlux2) if shape.flux2 else (ZImageTransformer2DModel, AutoencoderKL)
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # weights of 34 GB would be made in 68
    try:
        with torch.device(device):
            transformer, vae = (
                kind.from_config(config(part)) for kind, part in zip(kinds, ("transformer", "vae"), strict=True)
            )
            text = Qwen3ForCausalLM(Qwen3Config(**config("text_encoder")))
    finally:
        torch.set_default_dtype(usual)
    parts = [part.to(device, dtype).eval() for part in (transformer, vae, text)]
    for part in parts:
        draw(part)
    common = {
        "scheduler": FlowMatchEulerDiscreteScheduler.from_config(config("scheduler", "scheduler_config.json")),
        "transformer": parts[0],
        "vae": parts[1],
        "text_encoder": parts[2],
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
    }
    pipe: Any = Flux2KleinPipeline(**common, is_distilled=True) if shape.flux2 else ZImagePipeline(**common)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def diffusers(
    shape: Shape, folder: Path, part: str, at_once: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    """Its figures, as :func:`image.engine.rates` has ours. *part*: ``diffusers`` or ``diffusers-compiled``."""
    device, dtype = place(args)
    pipe = reference_pipeline(shape, folder, device, dtype)
    if part == "diffusers-compiled" and device.type == "cuda":
        pipe.transformer = torch.compile(pipe.transformer)
        pipe.vae.decode = torch.compile(pipe.vae.decode)
    more: dict[str, Any] = {"text_encoder_out_layers": (1, 2, 3)} if shape.flux2 and not shape.changes else {}
    more |= {} if shape.flux2 else {"guidance_scale": 0.0}

    def run(count: int) -> None:
        # batches of four at most: sixteen at 1024 x 1024 need more than a device has
        for begin in range(0, count, 4):
            size = min(4, count - begin)
            pipe(
                prompt=[PROMPT] * size,
                width=shape.size,
                height=shape.size,
                num_inference_steps=shape.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in range(begin, begin + size)],
                **more,
            )

    with torch.inference_mode():
        for count in at_once:
            run(count)
        return rates(run, at_once, args.rounds) | memory(args.device)
