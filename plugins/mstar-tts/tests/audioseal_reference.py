"""The reference, ``audioseal`` 0.2.0, where it is installed: ``pip install --no-deps audioseal==0.2.0``.

Its package imports omegaconf for files of settings; its networks do not, so they are imported without that.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["SIZES", "reference_detector", "reference_generator", "saved"]

SIZES: dict[str, Any] = {
    "channels": 1,
    "dimension": 128,
    "n_filters": 32,
    "n_residual_layers": 1,
    "ratios": [8, 5, 4, 2],
    "activation": "ELU",
    "activation_params": {"alpha": 1.0},
    "norm": "none",
    "norm_params": {},
    "kernel_size": 7,
    "last_kernel_size": 7,
    "residual_kernel_size": 3,
    "dilation_base": 2,
    "causal": True,
    "pad_mode": "constant",
    "true_skip": True,
    "compress": 2,
    "lstm": 2,
    "disable_norm_outer_blocks": 0,
}
"""Of the streaming cards."""

_BARE = ("audioseal", "audioseal.libs", "audioseal.libs.moshi", "audioseal.libs.moshi.modules")


def _module(name: str) -> Any:
    """Skips the test without the package."""
    if "audioseal" not in sys.modules:
        found = importlib.util.find_spec("audioseal")
        if found is None or not found.submodule_search_locations:
            pytest.skip("the reference is not installed: pip install --no-deps audioseal==0.2.0")
        os.environ["NO_TORCH_COMPILE"] = "1"
        root = Path(next(iter(found.submodule_search_locations)))
        for bare in _BARE:
            sys.modules[bare] = ModuleType(bare)
            sys.modules[bare].__path__ = [str(root.joinpath(*bare.split(".")[1:]))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, at how the reference is compiled
        return importlib.import_module(name)


def _sizes(filters: int) -> dict[str, Any]:
    return {**SIZES, "n_filters": filters, "dimension": 4 * filters}


def reference_generator(filters: int = 32) -> Any:
    """A random one; *filters*: 32 in the published one."""
    models, seanet = _module("audioseal.models"), _module("audioseal.libs.moshi.modules.seanet")
    sizes = _sizes(filters)
    torch.manual_seed(5)
    halves = seanet.SEANetEncoder(**sizes), seanet.SEANetDecoder(**sizes, trim_right_ratio=1.0)
    return _awake(models.AudioSealWM(*halves, models.MsgProcessor(16, sizes["dimension"])))


def reference_detector(filters: int = 32) -> Any:
    models, seanet = _module("audioseal.models"), _module("audioseal.libs.moshi.modules.seanet")
    torch.manual_seed(6)
    return _awake(models.AudioSealDetector(seanet.SEANetEncoderKeepDimension(**_sizes(filters)), nbits=16))


@torch.no_grad()
def _awake(model: Any) -> Any:
    """Weights as drawn let hardly anything through."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            fan = parameter[:, 0].numel() / 2 if "convtr" in name else parameter[0].numel()
            torch.nn.init.normal_(parameter, std=1.3 * fan**-0.5)
    return model.eval()


def saved(model: Any, norm: tuple[str, str] | None = None) -> dict[str, Tensor]:
    """The tensors as published files have them: a level less deep, and with weight norms under the names of *norm*."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        published = name.replace(".inner_conv.", ".")
        if norm is not None and published.endswith((".conv.conv.weight", ".convtr.convtr.weight")):
            stem = published.removesuffix("weight")
            tensors[stem + norm[0]] = value.flatten(1).norm(dim=1)[:, None, None]
            tensors[stem + norm[1]] = value * 1.7
        else:
            tensors[published] = value
    return {name: value.clone() for name, value in tensors.items()}
