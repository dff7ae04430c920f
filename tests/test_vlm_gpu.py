"""The benchmark of Qwen3.5 on a GPU: its parts on a tiny shape on the CPU, and what it takes a step to cost."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"

pytestmark = pytest.mark.usefixtures("benchmark_modules")


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "parameters", "state", "kv"),
    # without what is not multiplied: an embedding that is not the head, norms, convolutions
    [("4b", 4_205_751_296, 51_511_296, 32_768), ("9b", 8_953_803_264 - 248_320 * 4096, 51_511_296, 32_768)],
)
def test_what_a_step_must_read(name: str, parameters: int, state: int, kv: int) -> None:
    shape = module("gpu.hybrid").SHAPES[name]
    multiplied = sum(out * inner for out, inner in shape.products)
    assert 0 < parameters - multiplied < 2e6
    assert shape.state_bytes == 2 * state
    assert shape.kv_bytes == kv
    assert shape.prefill_flops(2048) > 2 * 2048 * (multiplied - shape.facts.vocab * shape.facts.hidden)


def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--shapes", "tiny", "--device", "cpu", "--repeats", "1", "--out", str(out)]
    assert module("vlm_gpu").main(words) == 0
    found = json.loads(out.read_text())["shapes"]["tiny"]
    assert found["check"]["verdict"] == "right"
    assert found["check"]["picture"]["tokens"] == 40
    assert [row["batch"] for row in found["decode"]] == [1, 3]
    assert all(row["step_ms"] > 0 and row["over_floor"] > 0 for row in found["decode"])
    assert [row["tokens"] for row in found["prefill"]] == [32, 96]
    assert 0 < found["turns"]["second_over_first"] < 1
    assert found["images"]["prompt_tokens"] > 16
    assert found["tower"]["check"]["float32"] < 1e-3
    assert all(row["eager_s"] > 0 and row["transformers_s"] > 0 for row in found["tower"]["loads"].values())
    assert [row["batch"] for row in found["peer"]] == [1, 3]


def test_a_part_that_fails_is_told_and_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = module("vlm_gpu")

    def broken(*given: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(vlm, "turns", broken)
    monkeypatch.setattr(vlm, "peer", broken)
    out = tmp_path / "found.json"
    words = f"--shapes tiny --device cpu --repeats 1 --parts turns,prefill,peer --out {out}"
    assert vlm.main(words.split()) == 1
    found = json.loads(out.read_text())["shapes"]["tiny"]
    assert found["turns"]["failed"] == found["peer"]["failed"] == "RuntimeError: no kernel"
    assert [row["tokens"] for row in found["prefill"]] == [32, 96]
