"""What a deployment asks for is checked against the model and the machine before anything is served (promise P3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mstar.cluster.base import Phase, WorkerConfig
from mstar.nn.model import Model
from mstar.nn.node import Node, Step
from mstar.registry import RegisteredModel
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import SetupError, WeightsError
from mstar.spec.graph import Call, Entry, Graph, NodeSpec, Partition, Port, Seq
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import miniature
from mstar.weights.names import Placement, WeightMap
from mstar.worker import build, machine

MIB = 2**20


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"resources": {"kv": {"tokens": 10**12}}}, r"tokens=1000000000000 need .* TB .*memory budget of .* GB"),
        ({"resources": {"kv": {"tokens": "many"}}}, r"resources\.kv\.tokens: .*integer.*'many'"),
        ({"resources": {"kv": {"token": 5}}}, r"resources\.kv\.token: unknown key; did you mean 'tokens'"),
        ({"resources": {"kw": {"tokens": 5}}}, r"resources\.kw: unknown resource; known: kv"),
        ({"placement": {"llm": [0]}}, r"placement\.llm: unknown node"),
        ({"device": "tpu9"}, r"device 'tpu9'"),
        ({"dtype": "float33"}, r"dtype 'float33' is not supported; did you mean 'float32'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Driver(miniature("mini_chat"), **overrides)


@pytest.mark.parametrize("key", ["mini_chat", "mini_seq2seq", "mini_rollout", "mini_world"])
def test_a_machine_without_memory_is_told_the_numbers(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 16)
    with pytest.raises(SetupError, match=r"memory budget of \d+ B"):
        Driver(miniature(key))


@pytest.mark.parametrize("own", [True, False])
def test_a_rank_takes_the_gpu_of_its_number_unless_it_sees_one_only(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    deployment = merge_deployment("mini_chat", {"replicas": 2, "placement": {"lm": 0, "codec": 1}, "device": "cuda"})
    config = WorkerConfig(key="mini_chat", weights=None, deployment=deployment, rank=1, replica=1, own_device=own)
    assert machine.rank_device(config) == (torch.device("cuda") if own else torch.device("cuda", 3))


def test_ranks_have_the_gpus_that_the_deployment_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share one plan with parts of it, and pass no tensors by NCCL."""
    monkeypatch.setattr(machine, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(machine, "free_memory", lambda device: 1200)
    placed = {"placement": {"lm": 0, "codec": [1, 2]}, "device": "cuda", "engine": {"runner": "eager"}}

    def of(numbers: list[int], rank: int) -> tuple[int | None, int]:
        deployment = merge_deployment("mini_tts", {**placed, "rank_devices": numbers})
        config = WorkerConfig(key="mini_tts", weights=None, deployment=deployment, rank=rank)
        device = machine.rank_device(config)
        return device.index, machine.plannable(config, device, {})

    assert [of([2, 2, 0], rank) for rank in (0, 1, 2)] == [(2, 600), (2, 600), (0, 1200)]
    assert [of([1, 1, 1], rank) for rank in (0, 1, 2)] == 3 * [(1, 400)]
    assert [of([], rank) for rank in (0, 1, 2)] == [(0, 1200), (1, 1200), (2, 1200)]
    with pytest.raises(SetupError, match="rank 2 of copy 0 needs cuda:3, and this machine has 3 GPUs"):
        of([0, 1, 3], 2)
    reserved = [
        machine.reserved_bytes(merge_deployment("m", {**placed, "rank_devices": numbers}), torch.device("cuda"))
        for numbers in ([0, 0, 0], [0, 0, 1], [])
    ]
    assert reserved[0] < reserved[1] == reserved[2]  # communicators


def test_one_rank_has_the_gpu_that_the_deployment_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = WorkerConfig(key="m", weights=None, deployment=merge_deployment("m", {"rank_devices": [3]}))
    assert machine.rank_device(config) == torch.device("cuda", 3)


def test_ranks_share_the_memory_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 1200)
    deployment = merge_deployment("mini_chat", {"replicas": 2, "placement": {"lm": 0, "codec": 1}})
    for sharing, part in ((None, 300), (1, 1200), (3, 400)):
        config = WorkerConfig(key="mini_chat", weights=None, deployment=deployment, sharing=sharing)
        assert machine.plannable(config, torch.device("cpu"), {}) == part


def test_a_rank_works_on_the_device_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise SetupError("as far as one gets without a GPU")

    monkeypatch.setattr(build, "rank_device", lambda config: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(SetupError, match="as far as one gets"):
        Driver(miniature("mini_chat"))
    assert chosen == [torch.device("cuda", 1)]


def test_a_pool_without_a_size_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 4 * MIB)
    resource = Driver(miniature("mini_chat"), resources={"kv": {"tokens": None}}, max_concurrent_requests=4096)
    kv = resource.worker.resources["kv"]
    held = kv.memory.data.nbytes  # type: ignore[attr-defined]
    assert 0.9 * MIB < held <= MIB


class Half(Node):
    def __init__(self, width: int):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(width))

    def forward(self, step: Step, ids: Tensor) -> dict[str, Tensor]:
        return {"ids": ids}


class TwoNodes(Model):
    """Two nodes with weights of their own in one checkpoint."""

    def graph(self) -> Graph:
        ids = Port("ids", "int64", ("T",))
        entry = Entry(inputs=(ids,), outputs=(ids,))
        first = Call("ears", inputs={"ids": "prompt"}, outputs={"ids": "heard"})
        second = Call("mouth", inputs={"ids": "heard"}, outputs={"ids": "said"})
        return Graph(
            nodes=(NodeSpec("ears", (entry,)), NodeSpec("mouth", (entry,))),
            walks={"all": Seq(first, second)},
            partitions=(Partition("main", ("all",)),),
            inputs=(Port("prompt", "int64", ("T",)),),
        )

    def build(self, node: str) -> Node:
        return Half(3 if node == "ears" else 4)

    def weights(self, node: str) -> WeightMap:
        other = "mouth" if node == "ears" else "ears"
        return WeightMap((Placement(f"{node}.scale", "scale"),), (rf"{other}\..*",))


def two_nodes(tensors: dict[str, Tensor], folder: Path, on_phase: Callable[[Phase], None] = lambda phase: None) -> Any:
    save_file(tensors, folder / "model.safetensors")
    registry = miniature_registry()
    plugin = registry.models["mini_chat"].plugin
    spec = replace(registry.model("mini_chat"), key="two", model=f"{__name__}:TwoNodes")
    registry.models["two"] = RegisteredModel(spec, plugin)
    config = WorkerConfig(
        key="two",
        weights=str(folder),
        deployment=merge_deployment("two", {"device": "cpu"}),
    )
    return build.build(config, registry, on_phase)


def test_weights_that_do_not_match_are_told_for_all_nodes_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        two_nodes({"ears.scale": torch.zeros(5), "moth.scale": torch.zeros(4)}, tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  node 'ears': 1 tensor(s) not used:",
        "    moth.scale [4] in model.safetensors",
        "  node 'ears': 1 tensor(s) of the wrong shape or type:",
        "    ears.scale in model.safetensors is [5], expected [3]",
        "  node 'mouth': 1 parameter(s) not filled:",
        "    scale: no tensor 'mouth.scale'; did you mean 'moth.scale'?",
        "  node 'mouth': 1 tensor(s) not used:",
        "    moth.scale [4] in model.safetensors; did you mean 'mouth.scale'?",
    ]


def test_every_node_gets_its_own_weights(tmp_path: Path) -> None:
    nodes = two_nodes({"ears.scale": torch.ones(3), "mouth.scale": torch.full((4,), 2.0)}, tmp_path).nodes
    assert (nodes["ears"].scale.tolist(), nodes["mouth"].scale.tolist()) == ([1.0] * 3, [2.0] * 4)
    assert not nodes["mouth"].training
    assert not nodes["mouth"].scale.requires_grad


def test_what_is_done_after_reading_is_no_reading(tmp_path: Path) -> None:
    phases: list[Phase] = []
    two_nodes({"ears.scale": torch.ones(3), "mouth.scale": torch.ones(4)}, tmp_path, phases.append)
    details = [phase.detail for phase in phases if phase.name == "weights"]
    assert details[-2:] == ["mouth: 0 of 0 MB", "read; getting them ready for cpu"]
    assert phases[-1].name == "warmup"


class InFolders(TwoNodes):
    """As repositories that have a folder for each part; the mouth's weights are doubled when they are there."""

    def weights(self, node: str) -> WeightMap:
        return WeightMap((Placement("scale", "scale"),), folder=node)

    def loaded(self, node: str, module: Node) -> None:
        if isinstance(module, Half) and node == "mouth":
            module.scale.data *= 2


def in_folders(tensors: dict[str, dict[str, Tensor]], folder: Path) -> Any:
    for name, found in tensors.items():
        (folder / name).mkdir()
        save_file(found, folder / name / "diffusion_pytorch_model.safetensors")
    registry = miniature_registry()
    spec = replace(registry.model("mini_chat"), key="two", model=f"{__name__}:InFolders")
    registry.models["two"] = RegisteredModel(spec, registry.models["mini_chat"].plugin)
    deployment = merge_deployment("two", {"device": "cpu"})
    return build.build(
        WorkerConfig(key="two", weights=str(folder), deployment=deployment), registry, lambda phase: None
    )


def test_a_folder_for_each_part(tmp_path: Path) -> None:
    nodes = in_folders({"ears": {"scale": torch.ones(3)}, "mouth": {"scale": torch.full((4,), 2.0)}}, tmp_path).nodes
    assert (nodes["ears"].scale.tolist(), nodes["mouth"].scale.tolist()) == ([1.0] * 3, [4.0] * 4)


def test_each_part_is_covered_by_itself(tmp_path: Path) -> None:
    more = {"scale": torch.ones(4), "stranger": torch.ones(1)}
    with pytest.raises(WeightsError) as caught:
        in_folders({"ears": {"scale": torch.ones(3)}, "mouth": more}, tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  node 'mouth': 1 tensor(s) not used:",
        "    stranger [1] in diffusion_pytorch_model.safetensors",
    ]
