"""Checkpoints in torch's own format: names, dtypes, faults, and nothing executed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from mstar.nn.linear import ColumnLinear, RowLinear
from mstar.nn.mesh import Mesh, building
from mstar.spec.errors import WeightsError
from mstar.weights.checkpoint import Checkpoint, open_checkpoint
from mstar.weights.loader import load
from mstar.weights.names import WeightMap
from mstar.weights.torch_file import TorchCheckpoint


def layer() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 2)


def write(folder: Path, content: object, **options: object) -> Path:
    torch.save(content, folder / "model.pth", **options)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_nested_dictionaries_are_loaded_under_joined_names(zipped: bool, tmp_path: Path) -> None:
    weight, bias = torch.randn(2, 3, dtype=torch.float64), torch.randn(2).to(torch.bfloat16)
    content = {"epoch": 3, "net": {"module.weight": weight, "module.bias": bias, "names": ["a"]}}
    folder = write(tmp_path, content, _use_new_zipfile_serialization=zipped)
    module = layer()
    seen: list[tuple[int, int]] = []
    names = WeightMap.from_module(module, rename={"": "net.module."})
    load(module, names, folder, torch.device("cpu"), torch.float32, lambda done, total: seen.append((done, total)))
    assert torch.equal(module.weight, weight.float())  # type: ignore[arg-type]
    assert torch.equal(module.bias, bias.float())  # type: ignore[arg-type]
    assert seen[-1] == (2 * 3 * 8 + 2 * 2,) * 2


@pytest.mark.parametrize(
    ("change", "word"),
    [({"bias": None}, "no tensor 'net.bias'"), ({"more": torch.ones(1)}, "net.more"), ({"bias": torch.ones(3)}, "[3]")],
)
def test_missing_superfluous_and_misshapen_tensors_are_named(
    change: dict[str, object], word: str, tmp_path: Path
) -> None:
    content = {"weight": torch.ones(2, 3), "bias": torch.ones(2), **change}
    folder = write(tmp_path, {"net": {name: value for name, value in content.items() if value is not None}})
    module = layer()
    with pytest.raises(WeightsError) as caught:
        load(module, WeightMap.from_module(module, {"": "net."}), folder, torch.device("cpu"), torch.float32)
    assert word in str(caught.value)


class Trap:
    """Runs a command where its pickle is loaded as Python loads pickles."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_in_it_is_refused_and_not_run(zipped: bool, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    folder = write(tmp_path, {"weight": Trap(sprung)}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match=r"model\.pth"):
        open_checkpoint(folder)
    assert not sprung.exists()


def spring(setting: object, state: dict[str, str]) -> None:
    Path(state["sprung"]).touch()


def saved_beside(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file that has a tensor, and beside it an object of class *name*, which runs code where it is made
    again: it leaves a file ``sprung``."""
    place, _, short = name.rpartition(".")
    for module in (place.partition(".")[0], place):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    kind = type(short, (), {"__module__": place, "__setstate__": spring})
    setattr(sys.modules[place], short, kind)
    setting = kind()
    setting.__dict__["sprung"] = str(folder / "sprung")
    return write(folder, {"xp.cfg": [setting], "model": {"weight": torch.ones(2)}, "step": 3})


def test_settings_of_the_training_are_left_out_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_beside("omegaconf.dictconfig.DictConfig", tmp_path, monkeypatch)
    assert list(open_checkpoint(folder).tensors) == ["model.weight"]
    assert not (tmp_path / "sprung").exists()
    torch.load(folder / "model.pth", weights_only=False)
    assert (tmp_path / "sprung").exists()  # else nothing was tried


def test_other_classes_beside_the_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_beside("omegaconfig.base.Other", tmp_path, monkeypatch)
    with pytest.raises(WeightsError, match=r"model\.pth"):
        open_checkpoint(folder)
    assert not (tmp_path / "sprung").exists()


def test_a_file_may_be_named_itself(tmp_path: Path) -> None:
    folder = write(tmp_path, {"weight": torch.ones(1)})
    torch.save({"other": torch.ones(1)}, folder / "other.pth")
    assert list(open_checkpoint(folder / "model.pth").tensors) == ["weight"]


@pytest.mark.parametrize("data", [b"", b"nonsense", b"junk\n", b"\x80\x02s.", b"PK\x03\x04 broken"])
def test_a_damaged_file_is_an_error_that_names_it(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(data)
    with pytest.raises(WeightsError, match=r"model\.pth"):
        open_checkpoint(tmp_path)


def test_tensors_without_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="named tensors"):
        open_checkpoint(write(tmp_path, [torch.ones(1)]))


def test_safetensors_come_first_and_two_files_of_torch_are_one_too_many(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write(tmp_path, {"weight": torch.ones(1)})
    assert isinstance(open_checkpoint(tmp_path), TorchCheckpoint)
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.ckpt")
    with pytest.raises(WeightsError, match=r"model\.pth, other\.ckpt"):
        open_checkpoint(tmp_path)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path), Checkpoint)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_share(rank: int, tmp_path: Path) -> None:
    up, down, bias = torch.randn(6, 4), torch.randn(4, 6), torch.randn(6)
    folder = write(tmp_path, {"up.weight": up, "up.bias": bias, "down.weight": down})
    with building(Mesh.sketch(tp=2, rank=rank)), torch.device("meta"):
        module = nn.ModuleDict({"up": ColumnLinear(4, 6, bias=True), "down": RowLinear(6, 4)})
    load(module, WeightMap.from_module(module), folder, torch.device("cpu"), torch.float32)
    own = slice(3 * rank, 3 * rank + 3)
    for name, expected in {"up.weight": up[own], "up.bias": bias[own], "down.weight": down[:, own]}.items():
        assert torch.equal(module.get_parameter(name), expected), name
