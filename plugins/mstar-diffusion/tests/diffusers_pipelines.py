"""The reference pipelines, from the checkpoints that the package's own models are loaded from."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mstar.nn.model import BuildContext, Model
from mstar.nn.node import Node, Step
from mstar.weights.loader import load
from mstar_diffusion.flux2.model import Flux2Klein
from mstar_diffusion.flux2.spec import Flux2Options
from mstar_diffusion.z_image.model import ZImage
from mstar_diffusion.z_image.spec import ZImageOptions

CPU = torch.device("cpu")
TAPS = (1, 2, 3)
"""A quarter, a half and three quarters of the tiny text encoder's layers."""


@cache
def pipeline(folder: Path) -> Any:
    """diffusers' pipeline of the checkpoint in *folder*, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
        from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline

        kind = ZImagePipeline if (folder / "transformer" / "config.json").read_text().count("ZImage") else None
        found = (kind or Flux2KleinPipeline).from_pretrained(folder, torch_dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


def model_of(folder: Path, kind: type[Model]) -> Any:
    options = ZImageOptions() if kind is ZImage else Flux2Options()
    return kind(BuildContext(folder, torch.float32, CPU, options))


def node_of(folder: Path, kind: type[Model], name: str) -> Any:
    """A node through the family's own loader, as a worker has it before it prepares it for its CPU."""
    model = model_of(folder, kind)
    node: Node = model.on_meta(name)
    load(node, model.weights(name), folder, CPU, torch.float32)
    model.loaded(name, node)
    return node


def step(entry: str = "forward", rows: int = 1) -> Step:
    offsets = torch.arange(rows + 1)
    return Step([1] * rows, offsets, offsets[:-1], [True] * rows, {}, CPU, torch.float32, None, entry)


KINDS = {"z_image": ZImage, "flux2": Flux2Klein}
