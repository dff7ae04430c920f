"""The loader: coverage both ways, damaged files, fused layouts, memory (promise P11)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar.nn.linear import LMHead, MergedLinear, QKVLinear, VocabEmbedding
from mstar.nn.norm import RMSNorm
from mstar.spec.errors import WeightsError
from mstar.weights import reader
from mstar.weights.loader import load
from mstar.weights.names import WeightMap

CPU = torch.device("cpu")


class Small(nn.Module):
    """One of each kind: fused, plain, tied, with a persistent and a computed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabEmbedding(7, 4)
        self.qkv_proj = QKVLinear(4, 2, 1, 3, bias=True)
        self.mlp = nn.ModuleDict({"gate_up_proj": MergedLinear(4, {"gate_proj": 5, "up_proj": 2})})
        self.norm = RMSNorm(4)
        self.head = LMHead(4, 7, tied=self.embed)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3), persistent=False)

    def compute_buffers(self, device: torch.device) -> dict[str, Tensor]:
        return {"table": torch.arange(3.0, device=device)}


def published() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "embed.weight": (7, 4),
        "q_proj.weight": (6, 4),
        "k_proj.weight": (3, 4),
        "v_proj.weight": (3, 4),
        "q_proj.bias": (6,),
        "k_proj.bias": (3,),
        "v_proj.bias": (3,),
        "mlp.gate_proj.weight": (5, 4),
        "mlp.up_proj.weight": (2, 4),
        "norm.weight": (4,),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"steps": torch.tensor(41)}


def meta() -> Small:
    with torch.device("meta"):
        return Small()


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> Small:
    module = meta()
    load(module, WeightMap.from_module(module, **options), folder, CPU, dtype)  # type: ignore[arg-type]
    return module


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Every third tensor in another shard, so that fused parameters are filled from several files."""
    names = list(tensors)
    index = {name: f"part-{position % 3}.safetensors" for position, name in enumerate(names)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def assert_filled(module: Small, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    want = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    fused = torch.cat([want[f"{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(module.qkv_proj.weight, fused)
    assert torch.equal(module.qkv_proj.bias, torch.cat([want[f"{part}_proj.bias"] for part in "qkv"]))
    gate_up = torch.cat([want["mlp.gate_proj.weight"], want["mlp.up_proj.weight"]])
    assert torch.equal(module.mlp["gate_up_proj"].weight, gate_up)
    assert torch.equal(module.embed.weight[:7], want["embed.weight"])
    assert len(module.embed.weight) == 8
    assert not module.embed.weight[7].any()  # rows of a vocabulary come in eights
    assert torch.equal(module.norm.weight, want["norm.weight"])
    assert module.steps.item() == 41
    assert module.table.tolist() == [0.0, 1.0, 2.0]
    assert module.head.weight is module.embed.weight
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert not module.training


def test_a_part_without_a_bias_has_zeros(tmp_path: Path) -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.ModuleDict({"qkv_proj": QKVLinear(4, 2, 1, 3, bias=("q_proj", "v_proj"))})

    tensors = {name: tensor for name, tensor in published().items() if re.fullmatch("[qkv]_proj.*", name)}
    module = build()
    with pytest.raises(WeightsError, match=r"k_proj\.bias .*not used|not used:\s+k_proj\.bias"):
        load(module, WeightMap.from_module(module), write(tmp_path, tensors), CPU, torch.float32)
    del tensors["k_proj.bias"]
    load(module, WeightMap.from_module(module), write(tmp_path, tensors), CPU, torch.float32)
    bias = torch.cat([tensors["q_proj.bias"], torch.zeros(3), tensors["v_proj.bias"]])
    assert torch.equal(module["qkv_proj"].bias, bias)  # type: ignore[index]
    del tensors["v_proj.bias"]
    module = build()
    with pytest.raises(WeightsError, match=r"no tensor 'v_proj\.bias'"):
        load(module, WeightMap.from_module(module), write(tmp_path, tensors), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("writer", [write, write_shards])
@pytest.mark.parametrize("block", [1, 64, 1 << 20])
def test_every_tensor_lands_in_its_rows(
    dtype: torch.dtype, writer: Callable[..., object], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BLOCK", block)  # cuts tensors along their rows
    writer(tmp_path, published())
    assert_filled(loaded(tmp_path, dtype), published(), dtype)


def test_progress_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", 64)
    write(tmp_path, published())
    module, seen = meta(), []
    load(module, WeightMap.from_module(module), tmp_path, CPU, torch.float32, lambda *at: seen.append(at))
    total = sum(tensor.nbytes for tensor in published().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 3


def test_renamed_prefix_and_float32_parameters(tmp_path: Path) -> None:
    tensors = {("text.layers." + n[4:] if n.startswith("mlp.") else "text." + n): t for n, t in published().items()}
    write(tmp_path, tensors)
    module = loaded(tmp_path, torch.bfloat16, rename={"": "text.", "mlp.": "text.layers."}, float32=(r"norm\..*",))
    assert module.norm.weight.dtype == torch.float32
    assert module.embed.weight.dtype == torch.bfloat16
    assert torch.equal(module.norm.weight, published()["norm.weight"])


def test_unfilled_and_unused_are_both_listed_with_the_nearest_name(tmp_path: Path) -> None:
    tensors = published()
    tensors["k_projection.weight"] = tensors.pop("k_proj.weight")
    tensors["unrelated"] = torch.zeros(2)
    write(tmp_path, tensors)
    with pytest.raises(WeightsError) as caught:
        loaded(tmp_path)
    message = str(caught.value)
    assert "1 parameter(s) not filled" in message
    assert "qkv_proj.weight: no tensor 'k_proj.weight'; did you mean 'k_projection.weight'?" in message
    assert "2 tensor(s) not used" in message
    assert "k_projection.weight [3, 4] in model.safetensors; did you mean 'k_proj.weight'?" in message
    assert "unrelated [2] in model.safetensors" in message


def test_everything_that_does_not_match_is_told_at_once(tmp_path: Path) -> None:
    tensors = published()
    del tensors["norm.weight"]
    write(tmp_path, tensors | {"unrelated": torch.zeros(2), "mlp.gate_proj.weight": torch.zeros(5, 5)})
    with pytest.raises(WeightsError) as caught:
        loaded(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  1 parameter(s) not filled:",
        "    norm.weight: no tensor 'norm.weight'",
        "  1 tensor(s) not used:",
        "    unrelated [2] in model.safetensors",
        "  1 tensor(s) of the wrong shape or type:",
        "    mlp.gate_proj.weight in model.safetensors is [5, 5], expected [5, 4]",
    ]


def test_long_lists_are_cut_at_ten(tmp_path: Path) -> None:
    write(tmp_path, published() | {f"extra{number}": torch.zeros(1) for number in range(14)})
    with pytest.raises(WeightsError, match=r"14 tensor\(s\) not used(.|\n)*… and 4 more"):
        loaded(tmp_path)


def test_ignored_and_tied_names_are_not_missed(tmp_path: Path) -> None:
    tensors = published()
    tensors |= {"rotary.inv_freq": torch.zeros(2), "head.weight": tensors["embed.weight"].clone()}
    write(tmp_path, tensors)
    assert_filled(loaded(tmp_path, ignore=(r".*inv_freq",)), published(), torch.float32)


def test_map_with_a_gap_is_refused(tmp_path: Path) -> None:
    write(tmp_path, published())
    module = meta()
    full = WeightMap.from_module(module)
    gap = WeightMap(tuple(p for p in full.placements if p.published != "mlp.up_proj.weight"), (r"mlp\.up_proj.*",))
    with pytest.raises(WeightsError, match=r"mlp\.gate_up_proj\.weight: the map fills 5 of 7 rows"):
        load(module, gap, tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(5, 5), r"mlp\.gate_proj\.weight in model\.safetensors is \[5, 5\], expected \[5, 4\]"),
        (torch.zeros(5, 4, dtype=torch.int8), r"holds I8, expected torch\.float32"),
    ],
)
def test_wrong_shape_or_type_names_file_and_tensor(tensor: Tensor, says: str, tmp_path: Path) -> None:
    write(tmp_path, published() | {"mlp.gate_proj.weight": tensor})
    with pytest.raises(WeightsError, match=says):
        loaded(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path, published()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=re.escape(str(file)) + ".*damaged or truncated"):
        loaded(tmp_path)


def test_missing_shard_names_it_and_a_tensor(tmp_path: Path) -> None:
    index = write_shards(tmp_path, published())
    (tmp_path / "part-1.safetensors").unlink()
    first = next(name for name, shard in index.items() if shard == "part-1.safetensors")
    with pytest.raises(WeightsError, match=rf"lacks part-1\.safetensors.*{re.escape(first)}"):
        loaded(tmp_path)


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    index = write_shards(tmp_path, published()) | {"ghost": "part-0.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(WeightsError, match=r"'ghost' should be in .*part-0.safetensors"):
        loaded(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"weight_map": 3}'])
def test_unreadable_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="is not an index"):
        loaded(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"should hold model.safetensors or an index of shards; it has none"):
        loaded(tmp_path)


def test_buffer_that_nobody_makes(tmp_path: Path) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(4)
            self.register_buffer("table", torch.zeros(3), persistent=False)

    write(tmp_path, {"norm.weight": torch.ones(4)})
    with torch.device("meta"):
        module = Forgetful()
    with pytest.raises(WeightsError, match="buffer table is neither published nor made by Forgetful"):
        load(module, WeightMap.from_module(module), tmp_path, CPU, torch.float32)


MEASURE = """
import sys
from pathlib import Path
import torch
from torch import nn
from mstar.nn.cpu_linear import prepare_cpu
from mstar.nn.linear import ColumnLinear, VocabEmbedding
from mstar.weights.loader import load
from mstar.weights.names import WeightMap

class Big(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = VocabEmbedding(16384, 1024)
        self.layers = nn.ModuleList(ColumnLinear(1024, 2048) for _ in range(layers))

def peak():
    status = Path("/proc/self/status").read_text()  # not ru_maxrss: it starts at the parent's
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

with torch.device("meta"):
    module = Big(int(sys.argv[2]))
torch.zeros(8, 8) @ torch.zeros(8, 8)
before = peak()
load(module, WeightMap.from_module(module), Path(sys.argv[1]), torch.device("cpu"), getattr(torch, sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_peaks_at_the_weights(dtype: str, tmp_path: Path) -> None:
    """A large embedding (32 MB) and 28 layers of 4 MB: 144 MB published in bfloat16, loaded as is and as float32."""
    layers = 28
    tensors = {f"layers.{n}.weight": torch.full((2048, 1024), n, dtype=torch.bfloat16) for n in range(layers)}
    write(tmp_path, tensors | {"embed.weight": torch.ones(16384, 1024, dtype=torch.bfloat16)})
    script = [sys.executable, "-c", MEASURE, str(tmp_path), str(layers), dtype]
    grown = float(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    weights = (layers * 2048 + 16384) * 1024 * getattr(torch, dtype).itemsize / 2**20
    assert weights - 5 < grown < weights + 70, (grown, weights)
