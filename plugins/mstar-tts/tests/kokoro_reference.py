"""The reference, ``kokoro`` 0.9.4, where it is installed: ``pip install --no-deps kokoro==0.9.4 loguru``.

Its package imports misaki and spaCy for texts; the model needs neither, so its modules are imported without that.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_tts.kokoro.convert import FILE, PARTS

CONFIG: dict[str, Any] = {
    "vocab": {symbol: number for number, symbol in enumerate("abcdefgh ,.", 1)},
    "n_token": 20,
    "hidden_dim": 512,  # the reference's decoder knows no other width
    "style_dim": 128,
    "n_layer": 2,
    "max_dur": 6,
    "dropout": 0.1,
    "n_mels": 80,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "dropout": 0.1,
    },
    "istftnet": {
        "upsample_rates": [10, 6],
        "upsample_kernel_sizes": [20, 12],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
        "resblock_kernel_sizes": [3, 7],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "upsample_initial_channel": 512,
    },
}


def reference_class() -> Any:
    """``KModel``. Skips the test without the packages."""
    if "kokoro.model" not in sys.modules:
        found = importlib.util.find_spec("kokoro")
        if found is None or not found.submodule_search_locations or importlib.util.find_spec("loguru") is None:
            pytest.skip("the reference is not installed: pip install --no-deps kokoro==0.9.4 loguru")
        bare = ModuleType("kokoro")
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules["kokoro"] = bare
    model = importlib.import_module("kokoro.model").KModel

    def quiet(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, at what the reference calls
            return model(*arguments)

    return quiet


def reference_model(folder: Path) -> Any:
    """A random ``KModel``, whose checkpoint in the published layout is written to *folder*."""
    nothing = folder / "nothing.pth"
    torch.save({}, nothing)
    model = reference_class()("hexgrad/Kokoro-82M", CONFIG, str(nothing)).eval()
    nothing.unlink()
    _randomise(model)
    content = {
        part: {f"module.{name}": value for name, value in getattr(model, part).state_dict().items() if _kept(name)}
        for part in PARTS
    }
    torch.save(content, folder / FILE)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return model


def _kept(name: str) -> bool:
    """The published file has no scale and shift of the instance norms, which stay 1 and 0."""
    return ".norm." not in name


@torch.no_grad()
def _randomise(model: Any) -> None:
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if not _kept(name):
            continue
        drawn = torch.randn(parameter.shape, generator=random)
        if "alpha" in name or name.endswith("weight_g"):
            parameter.copy_(1 + 0.2 * drawn)
        elif parameter.ndim > 1:
            parameter.copy_(drawn * parameter[0].numel() ** -0.5)
        else:
            parameter.copy_(0.1 * drawn)
    model.predictor.F0_proj.bias.fill_(120.0)
    model.predictor.F0_proj.weight.mul_(20)
    model.decoder.generator.conv_post.weight_g.mul_(0.1)


def without_rounding_luck(generator: Any) -> None:
    """The first window of the reference's transform is its own mirror image, so its angles are 0 or π; rounding decides
    whether π or -π. Make it π."""
    transform = generator.stft.transform

    def settled(sound: Tensor) -> tuple[Tensor, Tensor]:
        magnitude, angle = transform(sound)
        angle = angle.clone()
        angle[:, :, 0] = torch.where(angle[:, :, 0].abs() > 1.5, torch.pi, 0.0)
        return magnitude, angle

    generator.stft.transform = settled
