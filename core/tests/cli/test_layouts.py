"""Layouts that ship with a model's package: named with ``--layout``, or in a deployment file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checks import Run, deployment, facts

PACKAGE = """
from dataclasses import replace
import mstar
from mstar.testing.miniatures import miniature

@mstar.hookimpl
def mstar_models():
    layouts = {"apart": "placed:apart.yaml", "wrong": "placed:wrong.yaml", "gone": "placed:gone.yaml"}
    defaults = {"max_concurrent_requests": 3}
    return [replace(miniature("mini_tts").spec, key="placed", layouts=layouts, deployment=defaults)]
"""
APART = "placement: {codec: 1}\nrank_devices: [0, 0]\nresources:\n  kv: {tokens: 4096}\nmax_sessions: 5\n"


@pytest.fixture
def placed(mstar: Run, tmp_path: Path) -> Run:
    """A command line with a model whose package has three layouts, two of them damaged."""
    folder = tmp_path / "placed"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "apart.yaml").write_text(APART)
    (folder / "wrong.yaml").write_text("placement:\n  codex: 1\nmax_session: 3\n")

    def call(*words: str, **more: str) -> tuple[int, str, str]:
        return mstar(*words, **{"extra": "placed", **more})

    return call


def test_it_comes_between_the_package_s_defaults_and_the_operator_s_file(placed: Run, tmp_path: Path) -> None:
    plain, named = facts(placed, "placed"), facts(placed, "placed", "--layout", "apart")
    assert (plain["faults"], named["faults"]) == ([], [])
    assert plain["between_ranks"] is None
    assert named["between_ranks"]["way"] == "shm"
    assert (plain["max_concurrent_requests"], named["max_concurrent_requests"]) == (3, 3)
    units = {pool["name"]: pool["units"] for pool in named["pools"]}
    file = deployment(tmp_path, "layout: apart\nresources: {kv: {tokens: 8192}}\n")
    other = facts(placed, "placed", "--config", file)
    assert {pool["name"]: pool["units"] for pool in other["pools"]} == {**units, "kv": 2 * units["kv"]}
    assert other["between_ranks"] == named["between_ranks"]


def test_what_it_changes_is_seen_where_the_nodes_are(placed: Run) -> None:
    status, out, err = placed("graph", "placed", "--layout", "apart")
    assert (status, err) == (0, "")
    assert "lm on rank 0" in out
    assert "codec on rank 1" in out


def test_its_faults_are_told_with_its_file(placed: Run) -> None:
    found = {fault["key"]: fault for fault in facts(placed, "placed", "--layout", "wrong")["faults"]}
    assert found["max_session"]["file"] == found["placement.codex"]["file"] == "placed:wrong.yaml"
    assert found["max_session"]["message"] == "unknown key; did you mean 'max_sessions'?"
    assert "did you mean 'codec'?" in found["placement.codex"]["message"]
    status, _, err = placed("run", "placed", "hi", "--layout", "wrong")
    assert status == 1
    assert "placed:wrong.yaml: max_session: unknown key" in err
    (gone,) = facts(placed, "placed", "--layout", "gone")["faults"]
    assert (gone["file"], "cannot be read" in gone["message"]) == ("placed:gone.yaml", True)


def test_a_name_that_is_none_of_them_is_told_the_nearest(placed: Run, tmp_path: Path) -> None:
    (fault,) = facts(placed, "placed", "--layout", "appart")["faults"]
    assert (fault["file"], fault["key"]) == ("options given", "layout")
    assert fault["message"] == "'appart' is no layout of 'placed'; did you mean 'apart'?"
    file = deployment(tmp_path, "max_sessions: 1\nlayout: appart\n")
    (fault,) = facts(placed, "placed", "--config", file)["faults"]
    assert (fault["file"], fault["line"]) == (file, 2)
    status, _, err = placed("run", "placed", "hi", "--config", file)
    assert (status, err.strip()) == (1, f"{file}:2: layout: {fault['message']}")
    (fault,) = facts(placed, "placed", "--config", deployment(tmp_path, "layout: [apart]\n"))["faults"]
    assert fault["key"] == "layout"
    (fault,) = [fault for fault in facts(placed, "toy-chat", "--layout", "apart")["faults"] if fault["key"] == "layout"]
    assert fault["message"] == "'apart' is no layout of 'toy-chat'; its package has none"


def test_the_empty_name_is_none_of_them_and_does_not_stand_for_the_file_s(placed: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "layout: apart\n")
    (fault,) = facts(placed, "placed", "--config", file, "--layout", "")["faults"]
    assert (fault["file"], fault["message"]) == (
        "options given",
        "'' is no layout of 'placed'; known: apart, gone, wrong",
    )
    status, _, err = placed("run", "placed", "hi", "--config", file, "--layout", "")
    assert (status, err.strip()) == (1, f"options given: layout: {fault['message']}")


def test_they_are_listed(placed: Run) -> None:
    assert json.loads(placed("models", "placed", "--json")[1])["layouts"]["apart"] == "placed:apart.yaml"
    assert "--layout NAME" in placed("models", "placed")[1]
    assert "--layout" not in placed("models", "toy-chat")[1]


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("placement: {codec: 1}\nrank_devices: [0]\n", "rank_devices", "1 number for 2 ranks; give one for each"),
        ("replicas: 2\nrank_devices: [0, 1, 2]\n", "rank_devices", "3 numbers for 2 ranks; give one for each"),
        ("rank_devices: [-1]\n", "rank_devices", "Input should be greater than or equal to 0 (got -1)"),
        ("device: cuda:1\nrank_devices: [1]\n", "rank_devices", "the device is 'cuda:1' already"),
        ("executor: ray\nrank_devices: [0]\n", "rank_devices", "set 'ray.gpus: 0.5' for two on one"),
        (
            "placement: {codec: {ranks: [0, 1, 2], sp: 3}}\nrank_devices: [0, 1, 0]\n",
            "rank_devices",
            "ranks 0 and 2 compute node 'codec' together, so each needs a GPU of its own",
        ),
        (
            "device: cuda\nplacement: {codec: 1}\nrank_devices: [0, 0]\nengine: {values: nccl}\n",
            "engine.values",
            "the ranks share a GPU, and NCCL knows one rank of each",
        ),
    ],
)
def test_gpus_that_cannot_be_are_told(placed: Run, tmp_path: Path, text: str, key: str, message: str) -> None:
    faults = facts(placed, "placed", "--config", deployment(tmp_path, text))["faults"]
    assert any(fault["key"].startswith(key) and message in fault["message"] for fault in faults), faults


def test_it_is_for_one_model(placed: Run) -> None:
    status, _, err = placed("serve", "placed", "toy-chat", "--layout", "apart")
    assert status == 2
    assert "--layout is for one model" in err
