"""``mstar check`` of layouts: each rank is looked at by itself, with its nodes, its share and its part of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import Run, deployment, facts

from mstar.runtime import checking
from mstar.worker import machine

MINI = {"MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}


def test_a_rank_of_a_mesh_has_its_share(llama: Run, tmp_path: Path) -> None:
    weights = ("--weights", str(tmp_path / "llama"))
    alone = facts(llama, "toy-llama", *weights)
    file = deployment(tmp_path, "placement: {llm: {ranks: [0, 1], tp: 2}}\n")
    found = facts(llama, "toy-llama", "--config", file, *weights)
    assert found["faults"] == []
    sizes = {pool["name"]: pool["bytes"] for pool in alone["pools"]}
    assert {pool["name"]: pool["bytes"] for pool in found["pools"]} == {**sizes, "kv": sizes["kv"] // 2}
    assert found["nodes"][0]["bytes"] < 0.6 * alone["nodes"][0]["bytes"]
    file = deployment(tmp_path, "placement: {llm: {ranks: [0, 1, 2], tp: 3}}\n")
    divided = facts(llama, "toy-llama", "--config", file, *weights)["faults"]
    assert any("4 query heads are not divided by tp=3" in fault["message"] for fault in divided), divided
    assert {fault["key"].split(".")[0] for fault in divided} == {"placement"}


HEAVY = """
from dataclasses import replace
import mstar, torch
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.speech import Tts

class Model(Tts):
    def build(self, node):
        built = super().build(node)
        if node == "codec":
            built.register_buffer("heavy", torch.zeros(1_000_000, dtype=torch.uint8))
        return built

@mstar.hookimpl
def mstar_models():
    return [replace(miniature("mini_tts").spec, key="heavy", model="heavy:Model")]
"""


def test_a_rank_has_the_weights_of_its_nodes_and_its_part_of_the_host(
    mstar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(placement: str, tokens: int) -> list[str]:
        text = f"device: cpu\nplacement: {placement}\nresources: {{kv: {{tokens: {tokens}}}}}\n"
        file = deployment(tmp_path, text)
        return [fault["key"] for fault in facts(mstar, "heavy", "--config", file, extra="heavy", code=HEAVY)["faults"]]

    monkeypatch.setattr(checking, "free_memory", lambda device: 3_000_000)
    small, large = 1_920, 3_600  # 1.0 and 1.9 MB
    assert keys("{}", small) == []
    assert keys("{lm: 0, codec: 1}", small) == [], "rank 0 has 1.5 MB, and no codec"
    assert keys("{}", large) == []
    assert keys("{lm: 0, codec: 1}", large) == ["resources.kv"], "each has half of the host's memory"


def test_how_tensors_pass_between_ranks(mstar: Run, tmp_path: Path) -> None:
    def found(text: str) -> dict[str, Any]:
        return facts(mstar, "mini_chat", "--config", deployment(tmp_path, f"device: cpu\n{text}"), **MINI)

    assert found("placement: {lm: [0]}\n")["between_ranks"] is None
    several = "placement: {lm: {prefill: 1, decode: 0}}\n"
    assert found(several)["between_ranks"] == {"way": "shm", "why": "the ranks are on cpu"}
    assert found(several + "engine: {values: gloo}\n")["between_ranks"]["way"] == "gloo"
    (fault,) = found(several + "engine: {values: nccl}\n")["faults"]
    assert fault["key"] == "engine.values"
    assert fault["message"] == "nccl is for ranks on cuda, and these are on cpu; leave it out"


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("100000000", ("placement.lm.ranks.0", "Input should be less than 1024 (got 100000000)")),
        ("-1", ("placement.lm.ranks.0", "Input should be greater than or equal to 0 (got -1)")),
        ("[]", ("placement.lm", "no rank is named; leave the node out, and it runs on rank 0")),
    ],
)
def test_ranks_that_cannot_be_are_one_fault_each_at_once(
    mstar: Run, tmp_path: Path, place: str, fault: tuple[str, str]
) -> None:
    file = deployment(tmp_path, f"device: cpu\nplacement: {{lm: {place}}}\n")
    faults = facts(mstar, "mini_chat", "--config", file, **MINI)["faults"]
    assert [(found["key"], found["message"]) for found in faults] == [fault]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("device: cuda\nplacement: {lm: [0, 1, 2]}\n", ("placement", "3 ranks × 1 replica need a GPU each")),
        ("device: cuda\nplacement: {lm: [0, 1]}\nreplicas: 2\n", ("replicas", "2 GPUs; replicas: 1 would do")),
        ("device: cuda\nreplicas: 3\n", ("replicas", "2 GPUs; replicas: 2 would do")),
        ("device: cuda:2\n", ("device", "this machine has 2 GPUs, up to cuda:1")),
        ("device: cuda\nplacement: {lm: [0, 1]}\n", None),
        ("device: cuda\nplacement: {lm: [0, 1, 2]}\nexecutor: ray\n", None),
        ("device: cuda\nplacement: {lm: [0, 1, 2]}\nrank_devices: [0, 1, 1]\n", None),
        ("device: cuda\nrank_devices: [2]\n", ("rank_devices", "cuda:2: this machine has 2 GPUs, up to cuda:1")),
    ],
)
def test_too_few_gpus(
    mstar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fault: tuple[str, str] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(checking, "free_memory", lambda device: 1 << 33)
    monkeypatch.setattr(machine, "runner_name", lambda deployment, device: "eager")
    faults = facts(mstar, "mini_chat", "--config", deployment(tmp_path, text), **MINI)["faults"]
    told = [(found["key"], found["message"]) for found in faults]
    found = [(key, message) for key, message in told if key in ("placement", "replicas", "device", "rank_devices")]
    if fault is None:
        assert found == []
    else:
        assert [key for key, _ in found] == [fault[0]]
        assert fault[1] in found[0][1]


def test_a_gpu_elsewhere_is_a_remark(mstar: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = facts(mstar, "mini_chat", "--config", deployment(tmp_path, "device: cuda:7\n"), **MINI)
    assert found["ok"]
    assert "cuda:7 was not looked at: this machine has no GPU that PyTorch sees" in found["remarks"]
