"""Adapters in every layout, folded when the weights are loaded."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.checking import check_model
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar_diffusion.lora import read_adapter

RANK = 2
LAYERS = {
    "flux2": {
        "transformer_blocks.0.attn.to_q": (32, 32),
        "transformer_blocks.0.attn.to_k": (32, 32),
        "transformer_blocks.0.attn.to_v": (32, 32),
        "transformer_blocks.1.attn.to_out.0": (32, 32),
        "single_transformer_blocks.1.attn.to_qkv_mlp_proj": (288, 32),
        "norm_out.linear": (64, 32),
        "x_embedder": (32, 16),
    },
    "z_image": {
        "layers.0.attention.to_q": (48, 48),
        "layers.0.attention.to_k": (48, 48),
        "layers.0.attention.to_v": (48, 48),
        "layers.1.attention.to_out.0": (48, 48),
        "layers.1.feed_forward.w1": (128, 48),
        "context_refiner.0.feed_forward.w2": (48, 128),
        "layers.0.adaLN_modulation.0": (192, 48),
    },
}
KEYS = {"flux2": "flux2_klein", "z_image": "z_image_turbo"}


def matrices(family: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each layer *down* and *up*; queries, keys and values share their *down*, as they do in one layer."""
    random = torch.Generator().manual_seed(2)
    shared = torch.randn(RANK, next(iter(LAYERS[family].values()))[1], generator=random)
    found = {}
    for name, (out, width) in LAYERS[family].items():
        down = shared if name.endswith((".to_q", ".to_k", ".to_v")) else torch.randn(RANK, width, generator=random)
        found[name] = (down, torch.randn(out, RANK, generator=random))
    return found


def merged(family: str, folder: Path, into: Path, factor: float) -> Path:
    """The checkpoint of *folder* with the adapter added by hand."""
    shutil.copytree(folder, into)
    file = into / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for name, (down, up) in matrices(family).items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + factor * up @ down
    save_file(tensors, file, metadata={"format": "pt"})
    return into


def plain(family: str, prefix: str, down: str = "lora_A", up: str = "lora_B", infix: str = "") -> dict[str, Tensor]:
    found = {}
    for name, (a, b) in matrices(family).items():
        found[f"{prefix}{name}.{down}{infix}.weight"], found[f"{prefix}{name}.{up}{infix}.weight"] = a, b
    return {name: tensor.clone() for name, tensor in found.items()}


def flat(family: str) -> dict[str, Tensor]:
    """kohya's: underscores, and alpha as a tensor."""
    found = {}
    for name, (down, up) in matrices(family).items():
        base = "lora_unet_" + name.replace(".", "_")
        found |= {f"{base}.lora_down.weight": down.clone(), f"{base}.lora_up.weight": up}
        found[f"{base}.alpha"] = torch.tensor(float(RANK))
    return found


def native(family: str) -> dict[str, Tensor]:
    """The authors' names: queries, keys and values are one layer, FLUX's last modulation stands the other way round."""
    mats = matrices(family)
    found: dict[str, Tensor] = {}

    def add(name: str, down: Tensor, up: Tensor) -> None:
        found[f"diffusion_model.{name}.lora_A.weight"] = down.clone()
        found[f"diffusion_model.{name}.lora_B.weight"] = up.clone()

    if family == "flux2":
        parts = [mats[f"transformer_blocks.0.attn.to_{p}"] for p in "qkv"]
        add("double_blocks.0.img_attn.qkv", parts[0][0], torch.cat([up for _, up in parts]))
        add("double_blocks.1.img_attn.proj", *mats["transformer_blocks.1.attn.to_out.0"])
        add("single_blocks.1.linear1", *mats["single_transformer_blocks.1.attn.to_qkv_mlp_proj"])
        down, up = mats["norm_out.linear"]
        add("final_layer.adaLN_modulation.1", down, torch.cat(up.chunk(2)[::-1]))
        add("img_in", *mats["x_embedder"])
        return found
    parts = [mats[f"layers.0.attention.to_{p}"] for p in "qkv"]
    add("layers.0.attention.qkv", parts[0][0], torch.cat([up for _, up in parts]))
    add("layers.1.attention.out", *mats["layers.1.attention.to_out.0"])
    for name in ("layers.1.feed_forward.w1", "context_refiner.0.feed_forward.w2", "layers.0.adaLN_modulation.0"):
        add(name, *mats[name])
    return found


LAYOUTS: Mapping[str, Callable[[str], dict[str, Tensor]]] = {
    "peft": lambda family: plain(family, "base_model.model."),
    "peft, named": lambda family: plain(family, "base_model.model.", infix=".default"),
    "diffusers": lambda family: plain(family, "transformer."),
    "down and up": lambda family: plain(family, "diffusion_model.", "lora_down", "lora_up"),
    "kohya": flat,
    "native": native,
}


def painted(model: Any) -> np.ndarray:
    result = model.generate("a red cat", width=64, height=64, seed=5, num_inference_steps=2)
    return np.asarray(result.outputs["image"][0].frames[0], dtype=np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", LAYERS)
def test_every_layout(
    request: pytest.FixtureRequest, opened: Callable[..., Any], tmp_path: Path, family: str, layout: str
) -> None:
    """The picture is that of a checkpoint with the same sums in its weights, and not that of the plain one."""
    folder: Path = request.getfixturevalue(family)
    save_file(LAYOUTS[layout](family), tmp_path / "adapter.safetensors")
    lora = [{"path": str(tmp_path / "adapter.safetensors"), "scale": 0.3}]
    got = painted(opened(KEYS[family], model_kwargs={"lora": lora}))
    right = painted(opened(KEYS[family], merged(family, folder, tmp_path / "merged", 0.3)))
    np.testing.assert_allclose(got, right, atol=1)
    assert np.abs(got - painted(opened(KEYS[family]))).max() > 3


@pytest.mark.parametrize(
    ("config", "alpha", "factor"),
    [
        (None, None, 1.0),
        ({"r": RANK, "lora_alpha": 8}, None, 8 / RANK),
        ({"r": RANK, "lora_alpha": 8, "use_rslora": True}, None, 8 / math.sqrt(RANK)),
        ({"r": RANK, "lora_alpha": 8, "use_rslora": True}, 6.0, 6 / RANK),
        (None, 6.0, 6 / RANK),
    ],
)
@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_where_alpha_comes_from(
    tmp_path: Path, name: str, config: dict[str, Any] | None, alpha: float | None, factor: float
) -> None:
    tensors = {"x.lora_A.weight": torch.ones(RANK, 3), "x.lora_B.weight": torch.ones(4, RANK)}
    if alpha is not None:
        tensors["x.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "adapter.safetensors")
    if config is not None:
        (tmp_path / name).write_text(json.dumps(config))
    adapter = read_adapter(tmp_path / "adapter.safetensors")["x"]
    torch.testing.assert_close(adapter.delta(torch.device("cpu")), torch.full((4, 3), RANK * factor))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_diffusers_writes_the_configuration_into_the_files_head(tmp_path: Path, prefix: str) -> None:
    """It counts before one beside the file; ``alpha_pattern`` names the ends of layers' names."""
    layers = {f"transformer_blocks.{n}.attn.{end}": RANK + n for n in range(2) for end in ("to_q", "to_k")}
    tensors = {}
    for name, rank in layers.items():
        tensors[f"transformer.{name}.lora_A.weight"] = torch.ones(rank, 3)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.ones(4, rank)
    config = {
        "r": RANK,
        "lora_alpha": 8,
        "rank_pattern": {"blocks.1": 3},
        "alpha_pattern": {"to_k": 5, r"1\.attn\.to_q": 7},
    }
    head = {"lora_adapter_metadata": json.dumps({prefix + key: value for key, value in config.items()})}
    save_file(tensors, tmp_path / "adapter.safetensors", metadata=head)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 100}))
    found = read_adapter(tmp_path / "adapter.safetensors")
    alphas = [adapter.factor * len(adapter.down) for _, adapter in sorted(found.items())]
    assert alphas == pytest.approx([5, 8, 5, 7]), "to_k and to_q of the first block, then of the second"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora, which is not supported"),
        ({"lora_alpha": "much"}, "lora_alpha in its configuration should be a number, not 'much'"),
        ({"alpha_pattern": {"to_q": math.nan}}, "alpha_pattern in its configuration should be a number"),
        ({"alpha_pattern": {"(": 3}}, "'(' is no pattern"),
        ({"alpha_pattern": ["to_q"]}, "alpha_pattern in its configuration should be an object, not ['to_q']"),
    ],
)
def test_a_configuration_that_cannot_be_followed_stops_the_start(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    save_file({"x.lora_A.weight": torch.ones(2, 3), "x.lora_B.weight": torch.ones(4, 2)}, tmp_path / "a.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, **config}))
    with pytest.raises(SetupError, match=r"a\.safetensors") as caught:
        read_adapter(tmp_path / "a.safetensors")
    assert words in str(caught.value)


QUERIES = "transformer.transformer_blocks.0.attn.to_q"


def one(down: tuple[int, ...] = (2, 32), up: tuple[int, ...] = (32, 2)) -> dict[str, Tensor]:
    return {f"{QUERIES}.lora_A.weight": torch.ones(down), f"{QUERIES}.lora_B.weight": torch.ones(up)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"transformer.strange.lora_A.weight": torch.ones(2, 3)}, "no matrix lora_B"),
        (one(up=(32, 3)), f"tensor '{QUERIES}.lora_B.weight' is [32, 3]; of the rank of its lora_A, which is [2, 32]"),
        (
            one(down=(2, 31)),
            f"tensor '{QUERIES}.lora_A.weight' is [2, 31], for this model's layer it should be [2, 32]",
        ),
        (one(up=(33, 2)), f"tensor '{QUERIES}.lora_B.weight' is [33, 2], for this model's layer it should be [32, 2]"),
        (one(down=(0, 32), up=(32, 0)), "is [0, 32]: its rank is 0"),
        (one(down=(2, 32, 1)), "is [2, 32, 1] and no matrix"),
        ({**one(), f"{QUERIES}.alpha": torch.ones(2)}, "is [2] and no number"),
        (
            {**one(), **{f"transformer.x_embedder.{p}.weight": torch.ones(2, 2) for p in ("lora_A", "lora_B")}},
            "tensor 'transformer.x_embedder.lora_A.weight' is [2, 2], for this model's layer it should be [2, 16] "
            "(1 of 2 layers do not fit)",
        ),
        ({**one(), f"{QUERIES}.lora_B.weight": torch.full((32, 2), math.nan)}, "values that are no numbers"),
        ({**one(), f"{QUERIES}.alpha": torch.tensor(math.inf)}, "values that are no numbers"),
        ({name: tensor * 1e30 for name, tensor in one().items()}, "are too large for their type"),
        ({}, "has no tensors"),
        ({"transformer.x_embedder.bias": torch.ones(3)}, "none of a low-rank adapter"),
        (
            {
                "transformer.transformer_blocks.7.attn.to_q.lora_A.weight": torch.ones(2, 32),
                "transformer.transformer_blocks.7.attn.to_q.lora_B.weight": torch.ones(32, 2),
            },
            "no layer of this model's denoiser; did you mean 'transformer_blocks.1.attn.to_q'? (1 of 1 "
            "layers are unknown)",
        ),
        (
            {
                f"transformer.{name}.{part}.weight": torch.ones(2, 2)
                for name in ("down_blocks.0.q", "down_blocks.1.q", "x_embedder")
                for part in ("lora_A", "lora_B")
            },
            "(2 of 3 layers are unknown)",
        ),
    ],
)
def test_what_has_no_place_stops_the_start(
    opened: Callable[..., Any], tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    file = tmp_path / "adapter.safetensors"
    save_file(tensors, file)
    with pytest.raises(SetupError, match="adapter") as caught:
        opened("flux2_klein", model_kwargs={"lora": [{"path": str(file)}]})
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(file)), "names of layers, but not all of them"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_adapters_may_be_of_few_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(tensor.shape, generator=random).to(dtype) for name, tensor in one().items()}
    save_file(tensors, tmp_path / "few.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "many.safetensors")
    few, many = (read_adapter(tmp_path / f"{name}.safetensors")[QUERIES] for name in ("few", "many"))
    assert torch.equal(few.delta(torch.device("cpu")), many.delta(torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_no_number_stops_the_start_in_few_bits_too(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = one() | {f"{QUERIES}.lora_B.weight": torch.full((32, 2), math.nan)}
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "few.safetensors")
    with pytest.raises(SetupError, match=r"few\.safetensors: lora_B of .* has values that are no numbers"):
        read_adapter(tmp_path / "few.safetensors")


@pytest.fixture
def checked(flux2: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Checks a deployment of ``flux2_klein`` as it is written, beside a folder with its configurations alone."""
    folder = tmp_path / "configurations"
    shutil.copytree(flux2, folder, ignore=shutil.ignore_patterns("*.safetensors"))

    def check(written: str) -> Any:
        file = tmp_path / "deployment.yaml"
        file.write_text(written)
        installed = importlib.metadata.entry_points(group="mstar.plugins", name="diffusion")
        extra = () if installed else ("mstar_diffusion.plugin",)
        settings = replace(Settings.from_env(os.environ), extra_plugins=extra)
        registry = Registry(load_plugins(settings))
        return check_model(registry.model("flux2_klein"), settings, registry, config=file, weights=str(folder))

    return check


def lora(*paths: Path) -> str:
    return "model_kwargs:\n  lora:\n" + "".join(f"    - path: {path}\n" for path in paths)


def test_adapters_that_do_not_fit_are_found_without_weights(checked: Callable[[str], Any], tmp_path: Path) -> None:
    """In any spelling, and each beside the faults of others: ranks apart, another model's width, authors' names."""
    down, up = torch.ones(2, 32), torch.ones(64, 2)
    joined, strange = "diffusion_model.double_blocks.0.img_attn.qkv", "transformer.strange"
    files = {
        "good": one(),
        "ranks": one(up=(32, 3)),
        "width": one(down=(2, 31)),
        "authors": {f"{joined}.lora_A.weight": down, f"{joined}.lora_B.weight": up},
        "strange": {f"{strange}.lora_A.weight": down, f"{strange}.lora_B.weight": up},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:50])
    names = [*files, "damaged"]
    found = checked(lora(*(tmp_path / f"{name}.safetensors" for name in names)))
    wrong = {names[int(fault.key.split(".")[2])]: fault for fault in found.faults}
    assert wrong.keys() == {*names} - {"good"}
    assert [fault.line for fault in wrong.values()] == [4, 5, 6, 7, 8]
    for name, fault in wrong.items():
        assert f"{name}.safetensors" in fault.message
    assert "is [32, 3]; of the rank of its lora_A, which is [2, 32], it should be [32, 2]" in wrong["ranks"].message
    assert "is [2, 31], for this model's layer it should be [2, 32]" in wrong["width"].message
    assert "is [64, 2], for this model's layer it should be [96, 2]" in wrong["authors"].message
    assert "'transformer.strange' is no layer" in wrong["strange"].message
    assert "cannot be read" in wrong["damaged"].message


def test_an_adapter_that_fits_is_no_fault(checked: Callable[[str], Any], tmp_path: Path) -> None:
    save_file(one(), tmp_path / "good.safetensors")
    found = checked(lora(tmp_path / "good.safetensors"))
    assert (found.faults, found.complete) == ([], True)


def test_a_missing_file_stops_the_start(opened: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is not there"):
        opened("flux2_klein", model_kwargs={"lora": [{"path": str(tmp_path / "none.safetensors")}]})


def test_a_file_that_is_not_there_is_found_without_weights(checked: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = checked(lora(tmp_path / "nowhere.safetensors", tmp_path / "empty"))
    assert [(fault.file, fault.line, fault.key) for fault in found.faults] == [
        (str(tmp_path / "deployment.yaml"), 3, "model_kwargs.lora.0.path"),
        (str(tmp_path / "deployment.yaml"), 4, "model_kwargs.lora.1.path"),
    ]
    missing, empty = (fault.message for fault in found.faults)
    assert missing.endswith("nowhere.safetensors is not there")
    assert "one safetensors file; it holds none" in empty
