"""Every key's own deployment, and what a start says of slots and states that cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar.runtime.checking import check_model
from mstar.settings import Settings
from mstar.spec.errors import SetupError, WeightsError
from mstar.testing.drive import Driver
from mstar_qwen3.spec import MODELS

SMALL = {"device": "cpu", "dtype": "float32", "executor": "inline", "engine": {"threads": 1}}


@pytest.mark.parametrize("key", [spec.key for spec in MODELS])
def test_check(qwen3: Any, folders: dict[str, Path], key: str) -> None:
    found = check_model(qwen3.model(key), Settings(), qwen3, weights=str(folders["whole"]))
    assert found.faults == []
    assert found.complete
    assert found.deployment.max_concurrent_requests in (32, 64)
    assert found.deployment.model_kwargs["default_max_tokens"] == 4096


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"gdn_state": {"slots": 2}}, r"'gdn_state': slots=2, but 4 contexts may be open at once"),
        ({"gdn_state": {"state_dtype": "float16"}}, r"'gdn_state': state_dtype='float16'; use 'float32' or 'bfloat16'"),
        ({"kv": {"tokens": 512}}, r"'kv': one context of max_tokens=2048 needs 128 pages .*kv.tokens: 2048"),
    ],
)
def test_pools_that_cannot_be(qwen3: Any, folders: dict[str, Path], resources: dict[str, Any], message: str) -> None:
    sized = {"kv": {"tokens": 4096}, **resources}
    with pytest.raises(SetupError, match=message):
        Driver("qwen3_5_4b", qwen3, folders["text"], **SMALL, max_concurrent_requests=4, resources=sized)


def test_a_context_beyond_the_models_is_refused(qwen3: Any, folders: dict[str, Path]) -> None:
    options = {"max_tokens": 4096}
    with pytest.raises(SetupError, match=r"model_kwargs.max_tokens is 4096; the model takes 2 to 2048"):
        Driver("qwen3_5_4b", qwen3, folders["text"], **SMALL, model_kwargs=options)


def test_a_tensor_that_nobody_declares_is_told(qwen3: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """The head that drafts is skipped because it is declared, and nothing else is."""
    folder = tmp_path / "weights"
    shutil.copytree(folders["text"], folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        "mtp.layers.0.mlp.up_proj.weight": torch.zeros(3),
        "model.layers.0.linear_attn.in_proj_x.weight": torch.zeros(3),
    }
    save_file({**tensors, **extra}, folder / "model.safetensors")
    with pytest.raises(WeightsError) as fault:
        Driver("qwen3_5_4b", qwen3, folder, **SMALL, resources={"kv": {"tokens": 4096}})
    assert "model.layers.0.linear_attn.in_proj_x.weight" in str(fault.value)
    assert "mtp." not in str(fault.value)
