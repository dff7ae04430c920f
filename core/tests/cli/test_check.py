"""``mstar check``: every fault at once, without weights or a device, and the numbers when all is well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar.cluster.base import WorkerConfig
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError
from mstar.testing.drive import miniature_registry
from mstar.testing.miniatures import MINIATURES
from mstar.worker.core import Worker

Run = Callable[..., tuple[int, str, str]]
MINI = {"MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}


def deployment(tmp_path: Path, text: str) -> str:
    file = tmp_path / "deployment.yaml"
    file.write_text(text)
    return str(file)


def facts(run: Run, *words: str, **environ: str) -> dict[str, Any]:
    status, out, _ = run("check", *words, "--json", **environ)
    found: dict[str, Any] = json.loads(out)
    assert status == (0 if found["ok"] else 1)
    return found


def test_a_sound_model(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    assert found["faults"] == []
    (node,) = found["nodes"]
    hidden, kv, mlp = 32, 2 * 8, 64
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp + 2 * hidden
    assert node["parameters"] == 100 * hidden + 2 * layer + hidden, "the head is tied"
    kv_pool = next(pool for pool in found["pools"] if pool["name"] == "kv")
    tokens = 1024 + 16  # and the page of padding rows
    assert kv_pool["bytes"] == tokens * 2 * 2 * kv * 4, "tokens x layers x (K, V) x width x 4 bytes"
    assert (kv_pool["units"], kv_pool["owners"], kv_pool["full_requests"]) == (1024 // 16, 32, 1024 // 256)
    status, out, _ = llama("check", "toy-llama", "--weights", str(tmp_path / "llama"))
    assert status == 0
    assert "kv holds 4 of the greatest length" in out
    assert "ok: weights and pools take" in out


def test_every_fault_of_a_file_is_listed_with_the_nearest_right_name(llama: Run, tmp_path: Path) -> None:
    text = """
model: toy-llama
max_concurent_requests: 3
max_sessions: -1
executor: proceses
scheduler: {policy: defualt}
engine: {runner: eagr}
placement: {lm: [0], llm: [1]}
resources:
  kv: {tokns: 4, page_size: big}
  samplr: {vocab: 2}
"""
    found = facts(llama, deployment(tmp_path, text), "--weights", str(tmp_path / "llama"))
    faults = {fault["key"]: fault for fault in found["faults"]}
    hints = {
        "max_concurent_requests": "did you mean 'max_concurrent_requests'",
        "max_sessions": "greater than or equal to 0 (got -1)",
        "executor": "did you mean 'processes'",
        "scheduler.policy": "did you mean 'default'",
        "engine.runner": "did you mean 'eager'",
        "placement.lm": "did you mean 'llm'",
        "placement.llm": "has only rank 0",
        "resources.kv.tokns": "did you mean 'tokens'",
        "resources.kv.page_size": "valid integer",
        "resources.samplr": "did you mean 'sampler'",
    }
    assert faults.keys() == hints.keys()
    for key, hint in hints.items():
        assert hint in faults[key]["message"]
        assert faults[key]["file"].endswith("deployment.yaml")


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_numbers(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "resources: {kv: {tokens: 64}}\n")
    found = facts(llama, "toy-llama", "--config", file, "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert fault["key"] == "resources.kv"
    assert "one context of max_tokens=256 needs 16 pages" in fault["message"]


def test_plugins_that_the_file_requires_and_that_are_not_there(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "model: toy-llama\nrequired_plugins: [mstar-nowhere>=2]\n")
    found = facts(llama, file, "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert fault["key"] == "required_plugins"
    assert "mstar-nowhere" in fault["message"]


def test_a_gpu_that_is_not_here_does_not_matter(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "device: cuda\ndtype: bfloat16\n")
    found = facts(llama, "toy-llama", "--config", file, "--weights", str(tmp_path / "llama"))
    assert (found["ok"], found["device"], found["dtype"]) == (True, "cuda", "bfloat16")
    here = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    halves = [pool["bytes"] for pool in found["pools"] if pool["name"] == "kv"]
    assert halves == [pool["bytes"] // 2 for pool in here["pools"] if pool["name"] == "kv"]


def test_without_the_models_configuration_it_says_what_fetches_it(llama: Run) -> None:
    found = facts(llama, "toy-llama")
    (fault,) = found["faults"]
    assert "`mstar download toy-llama` fetches them" in fault["message"]
    assert "--weights DIR" in fault["message"]


def test_classes_that_are_not_there(mstar: Run) -> None:
    found = facts(mstar, "toy-chat")
    assert [(fault["key"], fault["file"]) for fault in found["faults"]] == [
        ("model", "spec of 'toy-chat'"),
        ("processor", "spec of 'toy-chat'"),
    ]
    assert all("No module named 'toys'" in fault["message"] for fault in found["faults"])


FAULTY = """
from dataclasses import replace
import mstar
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.text import Chat
from mstar.spec.graph import Call

class Faulty(Chat):
    def graph(self):
        graph = super().graph()
        node = graph.nodes[0]
        entry = replace(node.entries[0], name="forwrd", resources=("kvv",))
        return replace(graph, nodes=(replace(node, entries=(entry,)),), walks={**graph.walks, "spare": Call("lmm")})

@mstar.hookimpl
def mstar_models():
    mini = next(m.spec for m in MINIATURES if m.model.endswith("text:Chat"))
    return [replace(mini, key="faulty", model="cli_toys_faulty:Faulty")]
"""


def test_faults_of_a_graph(mstar: Run) -> None:
    status, out, err = mstar("check", "faulty", extra="cli_toys_faulty", code=FAULTY)
    assert status == 1
    assert "unknown resource 'kvv'" in err
    assert "walk 'spare' belongs to no partition" in err
    assert "call of 'lmm': unknown node; did you mean 'lm'?" in err
    assert "has no method for entry 'forwrd'; did you mean 'forward'?" in err
    assert "ok:" not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("toy-chta",), "did you mean 'toy-chat'"),
        (("missing.yaml",), "missing.yaml cannot be read"),
        (("toy-llama", "--weights", "./nowhere"), "there is no folder './nowhere'"),
    ],
)
def test_what_cannot_be_checked(llama: Run, words: tuple[str, ...], sentence: str) -> None:
    status, _, err = llama("check", *words)
    assert (status, sentence in err) == (2, True), err


def test_a_file_that_names_no_model(llama: Run, tmp_path: Path) -> None:
    status, _, err = llama("check", deployment(tmp_path, "max_sessions: 1\n"))
    assert (status, "add 'model: KEY'" in err) == (2, True)


@pytest.mark.parametrize("key", [mini.key for mini in MINIATURES])
def test_it_sees_what_the_worker_builds(mstar: Run, key: str) -> None:
    found = facts(mstar, key, **MINI)
    assert found["faults"] == []
    registry = miniature_registry()
    config = WorkerConfig(
        key=key,
        weights=None,
        deployment=merge_deployment(key, dict(registry.model(key).deployment)),  # type: ignore[arg-type]
    )
    worker = Worker(config, registry)
    real = {name: (pool.capacity(), pool.device_bytes()) for name, pool in worker.resources.items()}
    assert {pool["name"]: (pool["units"], pool["bytes"]) for pool in found["pools"]} == real


def test_the_worker_refuses_the_same_faults_at_once() -> None:
    registry = miniature_registry()
    key = MINIATURES[0].key
    wrong = {"placement": {"lmm": [0]}, "resources": {"kv": {"tokns": 1}, "kvv": {}}}
    config = WorkerConfig(key=key, weights=None, deployment=merge_deployment(key, {"device": "cpu", **wrong}))
    with pytest.raises(DeploymentError) as caught:
        Worker(config, registry)
    assert {path for path, _ in caught.value.faults} == {"placement.lmm", "resources.kv.tokns", "resources.kvv"}
