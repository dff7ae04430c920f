"""Nodes by themselves: a denoise step beside its floor, and decoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from image.engine import memory, settings_of
from image.figures import psnr
from image.floor import floor as floor_of
from image.random_weights import draw
from image.steady import seconds
from image.steps import ways
from mstar.engine.compile import compile_regions
from mstar.nn.model import BuildContext
from mstar.nn.node import Step
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.weights import loader

__all__ = ["floor", "place", "vae"]


def _node(shape: Any, folder: Path, name: str, device: Any, dtype: Any) -> Any:
    spec = Registry(load_plugins(settings_of())).model(shape.key)
    model = load_object(spec.model)(BuildContext(folder, dtype, device, spec.options()))
    node = model.on_meta(name)
    loader._materialise(node, model.weights(name), device, dtype)
    draw(node)
    model.loaded(name, node)
    return node.to(device).eval(), model


def _step(device: Any, dtype: Any) -> Any:
    offsets = torch.arange(2, device=device)
    return Step([1], offsets, offsets[:-1], [True], {}, device, dtype, None, "step")


def place(args: argparse.Namespace) -> tuple[Any, Any]:
    """Device, and the dtype that is served there."""
    device = torch.device(args.device)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def floor(shape: Any, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A denoise step in each way, beside its products and attention alone."""
    device, dtype = place(args)
    node, model = _node(shape, folder, "dit", device, dtype)
    facts, side, tokens = model.facts(), shape.size // 16, 512 if shape.flux2 else 64
    inputs = {
        "latent": torch.randn(1, side, side, facts.channels, device=device, dtype=dtype if shape.flux2 else None),
        "prompt": torch.randn(1, tokens, facts.prompt, device=device, dtype=dtype),
        "sigmas": torch.linspace(1, 0, 101, device=device)[None],
        "index": torch.zeros(1, dtype=torch.int64, device=device),
    }
    step = _step(device, dtype)
    with torch.inference_mode():
        found = {**floor_of(node, inputs, step, args.rounds, shape.steps), "steps": shape.steps}
        return found | ways(node, inputs, step, args.rounds, shape.steps)


def vae(shape: Any, folder: Path, args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    """Decoding one picture, plain and, where asked for, *compiled*."""
    device, dtype = place(args)
    node, model = _node(shape, folder, "vae_decoder", device, dtype)
    side = shape.size // 16
    latent = torch.randn(1, side, side, model.facts().channels, device=device, dtype=dtype)
    step, found = _step(device, dtype), {}
    with torch.inference_mode():
        found["plain_s"] = seconds(lambda: node.forward(step, latent), device, args.rounds)
        (plain,) = node.forward(step, latent)["image"]
        found |= memory(args.device)
        if compiled and device.type == "cuda":
            compile_regions({"vae_decoder": node})
            found["compiled_s"] = seconds(lambda: node.forward(step, latent), device, args.rounds)
            (other,) = node.forward(step, latent)["image"]
            found["compiled_psnr_db"] = psnr(other.cpu().numpy(), plain.cpu().numpy())
    return found
