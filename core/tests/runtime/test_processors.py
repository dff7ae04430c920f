"""A processor without its worker: only where its weights lie already."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import SPEC
from safetensors.torch import save_file
from test_opening import OneModel

from mstar.runtime.processors import present_processor
from mstar.settings import Settings
from mstar.spec.errors import DeploymentError, FaultFound
from mstar.spec.model import ModelSpec, WeightsRef
from mstar.spec.processor import ProcessorContext


class Reads:
    def __init__(self, context: ProcessorContext):
        self.weights = context.weights
        if self.weights is not None:
            self.words = (self.weights / "voices.txt").read_text().split()


def spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {"processor": f"{__name__}:Reads", "deployment": {"executor": "inline"}}
    return dataclasses.replace(SPEC, **(facts | changes))


def present(made: ModelSpec, tmp_path: Path, **overrides: Any) -> Any:
    registry: Any = OneModel(made)
    return present_processor(made.key, Settings(cache=tmp_path / "cache"), overrides, registry)


def checkpoint(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")


def test_it_is_made_of_weights_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    made = spec(weights=(WeightsRef("path", str(folder)),))
    assert present(made, tmp_path) is None
    checkpoint(folder)
    (folder / "voices.txt").write_text("ann bob")
    assert present(made, tmp_path).words == ["ann", "bob"]
    assert present(spec(), tmp_path, weights=str(folder)).words == ["ann", "bob"]
    assert not (tmp_path / "cache").exists(), "nothing is fetched or converted for it"


def test_a_model_without_weights_has_one_too(tmp_path: Path) -> None:
    assert present(spec(), tmp_path).weights is None


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    checkpoint(tmp_path / "empty")
    with pytest.raises(FaultFound, match=f"the processor of '{SPEC.key}' could not be loaded"):
        present(spec(), tmp_path, weights=str(tmp_path / "empty"))
    with pytest.raises(DeploymentError, match="max_sessions"):
        present(spec(), tmp_path, max_sessions="many")
