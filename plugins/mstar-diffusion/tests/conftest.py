from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mstar
from mstar.runtime.local import Local
from mstar.settings import Settings
from mstar_diffusion.flux2 import tiny as flux2_tiny
from mstar_diffusion.z_image import tiny as z_image_tiny

sys.path.append(str(Path(__file__).parent))  # for diffusers_pipelines and served_attention

MODULE = "mstar_diffusion.plugin"

torch.set_num_threads(1)  # bit for bit as the reference: with more, how a product is cut depends on its sizes


def extra_plugins() -> tuple[str, ...]:
    """The plugin's module where it is not installed."""
    return () if importlib.metadata.entry_points(group="mstar.plugins", name="diffusion") else (MODULE,)


@pytest.fixture(scope="session")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z_image")
    z_image_tiny.write(folder)
    return folder


@pytest.fixture(scope="session")
def flux2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux2")
    flux2_tiny.write(folder)
    return folder


@pytest.fixture(scope="session")
def folder_of(z_image: Path, flux2: Path) -> Callable[[str], Path]:
    return lambda key: z_image if key == "z_image_turbo" else flux2


Open = Callable[..., Local]


@pytest.fixture
def opened(folder_of: Callable[[str], Path]) -> Iterator[Open]:
    """Opens a tiny model by key, with further fields of a deployment; closed after the test."""
    models: list[Local] = []

    def open_(key: str, weights: Path | None = None, **deployment: Any) -> Local:
        settings = replace(
            Settings.from_env(os.environ), extra_plugins=extra_plugins(), accept_licences=("flux2_klein_9b",)
        )
        models.append(
            mstar.load(key, weights=str(weights or folder_of(key)), device="cpu", settings=settings, **deployment)
        )
        return models[-1]

    yield open_
    for model in models:
        model.close()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
