"""Checks of loading: every tensor is used, every parameter is filled (promise P11)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mstar.spec.errors import WeightsError
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.drive import Driver
from mstar.weights.torch_file import TORCH_FILES

__all__ = ["WeightsChecks"]

_STRANGER = "conformance.stranger.weight"
_TRIED = 3
"""Tensors that are left out, one at a time."""


class WeightsChecks:
    """The loader notices what is missing and what is too much."""

    def test_checkpoint(self, mstar_model: Subject) -> None:
        """A model with weights has a tiny checkpoint to be tested with."""
        if mstar_model.lacks_checkpoint:
            key = mstar_model.spec.key
            fail(
                f"{key!r} has weights, but nothing to test it with: set ModelSpec.tiny to the 'module:function' that "
                "writes a small random checkpoint in the published layout into a folder, or pass "
                f"--mstar-weights {key}=DIR. Without it most checks are skipped."
            )

    def test_missing_tensor_is_noticed(self, mstar_model: Subject, tmp_path: Path) -> None:
        """Without one of its tensors the model does not load, and the error names the tensor."""
        names, parts = _used(mstar_model)
        for name in {names[round(i * (len(names) - 1) / (_TRIED - 1))] for i in range(_TRIED)}:
            folder = _copy(mstar_model, parts, tmp_path / name)
            _rewrite(folder, parts, drop=name)
            fault = _load(mstar_model, folder)
            if fault is None:
                fail(
                    f"{mstar_model.spec.key!r} loads without tensor {name!r}: what it should fill has random content. "
                    "List every parameter in weights(node), or load with mstar.weights.loader"
                )
            _check_names(mstar_model, fault, name, "left out")

    def test_unused_tensor_is_noticed(self, mstar_model: Subject, tmp_path: Path) -> None:
        """With a tensor that it does not know the model does not load, and the error names the tensor."""
        _, parts = _used(mstar_model)
        folder = _copy(mstar_model, parts, tmp_path / "more")
        _rewrite(folder, parts, add=_STRANGER)
        fault = _load(mstar_model, folder)
        if fault is None:
            fail(
                f"{mstar_model.spec.key!r} loads a checkpoint with a tensor that it does not use ({_STRANGER!r}): a "
                "newer layout would be served wrong without a word. Let weights(node) ignore only names that it knows"
            )
        _check_names(mstar_model, fault, _STRANGER, "added")


def _used(subject: Subject) -> tuple[list[str], list[str]]:
    """Published tensors that the model's weight maps use, and the folders, below the weights', of their checkpoints;
    skips the test if there is nothing to load."""
    if not subject.spec.weights and subject.weights is None:
        pytest.skip(f"{subject.spec.key!r} has no weights")
    driver = subject.driver()
    assert subject.weights is not None
    maps = [driver.worker._model.weights(node.name) for node in driver.worker.plan.graph.nodes]
    names = {place.published for found in maps if found is not None for place in found.placements}
    parts = sorted({found.folder for found in maps if found is not None})
    if not names:
        pytest.skip(f"{subject.spec.key!r} maps no published tensor: its weights(node) is None for every node")
    if not _files(subject.weights, parts):
        pytest.skip(f"{subject.weights} holds no checkpoint that could be damaged")
    return sorted(names), parts


def _files(folder: Path, parts: Iterable[str]) -> list[Path]:
    """The safetensors of each checkpoint, or the file of torch's format that stands for them."""
    found: list[Path] = []
    for part in parts:
        place = folder / part
        found += sorted(place.glob("*.safetensors")) or sorted(f for kind in TORCH_FILES for f in place.glob(kind))
    return found


def _copy(subject: Subject, parts: Iterable[str], folder: Path) -> Path:
    assert subject.weights is not None
    size = sum(file.stat().st_size for file in _files(subject.weights, parts))
    if size > 64 << 20:
        pytest.skip(f"{subject.weights} is {size / 1e6:.0f} MB: only a tiny checkpoint is copied and damaged")
    shutil.copytree(subject.weights, folder)
    return folder


def _rewrite(folder: Path, parts: Iterable[str], drop: str | None = None, add: str | None = None) -> None:
    """Take tensor *drop* out of the checkpoint in *folder*, index included, or put tensor *add* into it."""
    for file in _files(folder, parts):
        if file.suffix != ".safetensors":
            content = torch.load(file, weights_only=True)
            if drop is not None and not _take_out(content, drop):
                continue
            if add is not None:
                content[add] = torch.zeros(3)
            torch.save(content, file)
            return
        tensors = load_file(file)
        if drop is not None and drop not in tensors:
            continue
        tensors.pop(drop or "", None)
        if add is not None:
            tensors[add] = torch.zeros(3)
        save_file(tensors, file, metadata={"format": "pt"})
        for index in file.parent.glob("*.safetensors.index.json"):
            content = json.loads(index.read_text())
            content["weight_map"].pop(drop, None)
            if add is not None:
                content["weight_map"][add] = file.name
            index.write_text(json.dumps(content))
        return


def _take_out(content: dict[str, Any], name: str) -> bool:
    """Remove the tensor whose keys, joined by dots, are *name*: see :func:`mstar.weights.torch_file.flat`. False if
    there is none."""
    for key, value in list(content.items()):
        if key == name:
            del content[key]
            return True
        if isinstance(value, dict) and name.startswith(f"{key}.") and _take_out(value, name[len(key) + 1 :]):
            return True
    return False


def _load(subject: Subject, folder: Path) -> Exception | None:
    try:
        Driver(subject.spec, subject.registry, folder, **subject.overrides)
    except Exception as error:
        return error
    return None


def _check_names(subject: Subject, fault: Exception, name: str, done: str) -> None:
    if not isinstance(fault, WeightsError) or name not in str(fault):
        fail(
            f"{subject.spec.key!r}: with tensor {name!r} {done}, loading raised {type(fault).__name__}, which should "
            f"be a WeightsError that names the tensor: {fault}"
        )
