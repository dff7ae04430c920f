"""A plugin for benchmarks of pictures: weights are random numbers instead of what a file holds.

Checkpoints of these sizes are 16 to 50 GB; a server that draws them on its device starts in seconds. Named in
``MSTAR_EXTRA_PLUGINS``, so that every process of a server has it. What is drawn depends on the name of a tensor and on
nothing else, so two servers have the same weights.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mstar.weights import loader
from mstar.weights.names import WeightMap

__all__ = ["draw"]


def draw(module: nn.Module) -> None:
    """Matrices as wide as their input is long, norms of one, biases of nothing."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not tensor.is_floating_point() or name.endswith(("inverse", "frequencies")):
                continue
            if tensor.ndim > 1:
                random = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
                tensor.normal_(0, tensor[0].numel() ** -0.5, generator=random)
            elif name.endswith("weight") or name.endswith("running_var"):
                tensor.fill_(1)
            else:
                tensor.zero_()


def _load(
    module: nn.Module,
    weightmap: WeightMap,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Any = None,
) -> None:
    loader._materialise(module, weightmap, device, dtype)
    draw(module)
    module.eval()


def _mismatches(module: nn.Module, weightmap: WeightMap, folder: Path) -> list[str]:
    return []


# only where the benchmark says so: an import by itself must not change what a loader does
if os.environ.get("MSTAR_BENCH_RANDOM") == "1":
    loader.load, loader.mismatches = _load, _mismatches
