"""The GPU benchmark: its parts on a tiny shape on the CPU, what it makes of their figures, and what fails in it."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.deployment import merge_deployment
from mstar.weights.checkpoint import Checkpoint

FOLDER = Path(__file__).parent.parent / "benchmarks"
PARTS = ["floors", "decode", "prefill", "host", "load"]

pytestmark = pytest.mark.usefixtures("benchmark_modules")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"gpu.{name}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny checkpoint in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    module("checkpoints").publish(module("shapes").SHAPES["tiny"], folder / "tiny")
    return folder


def job(checkpoints: Path, *parts: str, **changed: Any) -> Any:
    fields = {"shape": "tiny", "parts": parts, "device": "cpu", "folder": str(checkpoints), "out": ""}
    return module("child").Job(**fields | changed)


def run(work: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    assert module("child").run(work, found.__setitem__)
    return found


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3.2-3b", 3_212_749_824), ("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)],
)
def test_shapes_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    shape = module("shapes").SHAPES[name]
    assert sum(math.prod(size) for _, size, _, _ in module("checkpoints").tensors(shape)) == parameters
    norms_and_second_embedding = parameters - shape.read_bytes // 2
    assert 0 < norms_and_second_embedding < 2e6 + (0 if shape.facts.tied else shape.head_weights)


def test_flops_of_a_prompt() -> None:
    shape = module("shapes").SHAPES["qwen3-8b"]
    assert shape.prefill_flops(8192) == pytest.approx(2 * 6.946e9 * 8192 + 36 * 4 * 4096 * 8192**2 / 2, rel=1e-3)
    assert shape.kv_bytes == 147_456


def test_a_checkpoint_has_shards_an_index_and_a_text_for_every_id(tmp_path: Path) -> None:
    shape = module("shapes").SHAPES["tiny"]
    folder = module("checkpoints").publish(shape, tmp_path / "tiny", shard_bytes=60_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    assert len(Checkpoint(folder).tensors) == 2 + 9 * 2
    tokenizer = TextTokenizer(folder)
    assert tokenizer.vocab_size == shape.facts.vocab
    words = [tokenizer.decode([token]) for token in range(400, shape.facts.vocab)]
    assert len(set(words)) == len(words)
    assert all(len(word) > 1 for word in words)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    module("checkpoints").publish(shape, folder)
    assert before == {file: file.stat().st_mtime_ns for file in folder.iterdir()}, "it was there already"


def test_weights_have_the_scale_that_they_should(checkpoints: Path) -> None:
    with safe_open(checkpoints / "tiny" / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.1.mlp.gate_proj.weight").float()
        norm = file.get_tensor("model.norm.weight").float()
    assert float(weight.std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.1)
    assert float(norm.std()) > 0.05


def test_every_part_of_the_engine_runs_and_the_figures_fit_together(checkpoints: Path) -> None:
    found = run(job(checkpoints, *PARTS))
    assert {name: part.get("traceback") for name, part in found.items()} == dict.fromkeys(PARTS)
    rows = found["decode"]["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [(b, m) for b in (1, 3) for m in ("greedy", "sampled")]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["mean_step_s"])
        assert 20 < row["context"] < 60
    assert [row["steps"] for row in found["prefill"]["rows"]] == [1, 1]
    assert found["load"]["rows"][0]["tokens"] == 3 * 12
    host = found["host"]
    assert host["not_found"] == []
    assert {"schedule", "plan kv", "gather", "run", "land", "route", "events"} <= host["parts_us"].keys()
    assert sum(host["parts_us"].values()) + host["outside_us"] == pytest.approx(host["host_us"])
    summary = module("report").derive(found)
    floor = found["floors"]["linear_graph_s"]["3"] + rows[2]["kv_read_bytes"] / found["floors"]["copy_bytes_per_s"]
    assert summary["decode"][2]["over_floor"] == pytest.approx(rows[2]["step_s"] / floor)
    busy = {"batch": 3, "mode": "greedy", "busy_us_per_step": 1e6 * rows[2]["step_s"] / 4, "kernels_per_step": 7.0}
    traced = {**found, "timeline": {"rows": [{**busy, "idle_share": 0.8}]}}
    row = module("report").derive(traced)["decode"][2]
    assert (row["idle_share"], row["idle_share_profiled"]) == (pytest.approx(0.75), 0.8)
    module("report").print_report({"shapes": {"tiny": {**traced, "summary": module("report").derive(traced)}}})


def test_a_stopwatch_counts_each_moment_once_and_leaves_nothing_behind() -> None:
    class Machine:
        def outer(self) -> None:
            spin(0.002)
            self.inner()

        def inner(self) -> None:
            spin(0.004)

    def spin(seconds: float) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    watch, machine = module("host").Stopwatch(), Machine()
    watch.wrap(machine, "outer", "outer")
    watch.wrap(Machine, "inner", "inner")
    watch.wrap(machine, "absent", "absent")
    began = time.perf_counter()
    machine.outer()
    whole = time.perf_counter() - began
    watch.undo()
    assert watch.seconds["inner"] >= 0.004
    assert 0.002 <= watch.seconds["outer"] <= whole - 0.004
    assert watch.missing == ["Machine.absent"]
    assert vars(machine) == {}
    machine.outer()
    assert watch.calls == {"outer": 1, "inner": 1}


def test_parity_finds_a_wrong_token_and_lets_right_ones_pass(checkpoints: Path) -> None:
    check, engine = module("check"), module("engine")
    reference = check.Reference(checkpoints / "tiny", "cpu")
    worker = engine.Engine("tiny", checkpoints / "tiny", check._deployment("cpu", {"attention": "torch_sdpa"}))
    answers = check._answers(worker, (5, 130))
    worker.close()
    assert check.compare(reference, answers)["wrong"] == 0
    _, answer = answers[1]
    answer[20] = (answer[20] + 1) % 640
    found = check.compare(reference, answers)
    assert found["wrong"] >= 1
    assert found["largest_gap"] > found["tolerance"]


def test_the_check_tries_every_backend_and_fails_where_the_engine_is_wrong(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = module("check")
    monkeypatch.setattr(check, "CHECKED", ("tiny",))
    monkeypatch.setattr(check, "MIXED", (3, 110))
    found = check.check(job(checkpoints, "check"), {})
    assert found["verdict"] == "right"
    verdicts = {row["options"]["attention"]: row["verdict"] for row in found["rows"]}
    assert verdicts == {
        "torch_sdpa": "right",
        "numba_cpu": "right",
        "flashinfer": "not usable",
        "batch_invariant": "not usable",
    }
    assert {row["options"]["lookahead"] for row in found["rows"]} == ({True, False})
    monkeypatch.setattr(check, "TOLERANCE", -1.0)
    monkeypatch.setattr(check, "LEAST_TOLERANCE", -1.0)
    assert "tiny" in check.check(job(checkpoints, "check"), {})["failed"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12))
def test_busy_time_is_that_of_the_union(pairs: list[tuple[int, int]]) -> None:
    timeline = module("timeline")
    spans = [timeline.Span("k", begin, begin + length) for begin, length in pairs]
    assert timeline.busy(spans) == len({moment for span in spans for moment in range(span.begin, span.end)})


def test_the_digest_of_a_timeline() -> None:
    timeline = module("timeline")
    spans = [timeline.Span(name, n * 1000 + at, n * 1000 + at + long) for n in range(4) for name, at, long in KERNELS]
    found = timeline.digest(spans, 4)
    assert found["kernels_per_step"] == 2
    assert found["busy_us_per_step"] == pytest.approx(0.5)
    assert found["idle_share"] == pytest.approx(1 - 2000 / 3500)
    assert [(row["name"], row["us_per_step"]) for row in found["top"]] == [("product", 0.4), ("norm", 0.2)]


KERNELS = [("product", 0, 400), ("norm", 300, 200)]


def test_steady_decode_of_a_peer() -> None:
    assert module("peer").steady([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]) == (4, 2.0)
    assert module("peer").steady([[0.0, 1.0], [2.0, 3.0]]) == (0, 0.0)


def test_the_peer_decodes_over_a_static_cache(checkpoints: Path) -> None:
    found = run(job(checkpoints, "static"))["static"]
    assert found["steps"] == 4, found
    assert found["tokens_per_s"] == pytest.approx(1 / found["step_s"])
    assert found["step_s"] <= found["step_streamed_s"]


def test_a_changed_deployment_keeps_what_it_does_not_name() -> None:
    sizes = module("shapes").FULL
    plain = module("deploy").deployment(sizes, "cuda")
    changed = module("deploy").deployment(sizes, "cuda", {"scheduler": {"max_step_rows": 7}, "dtype": "float16"})
    assert changed == {
        **plain,
        "dtype": "float16",
        "scheduler": {"max_step_tokens": 8192, "max_step_rows": 7},
    }
    merged = merge_deployment("qwen3-8b", changed)
    assert merged.max_concurrent_requests >= max(sizes.batches)
    assert merged.resources["kv"]["tokens"] >= 128 * (sizes.prompt + sizes.answer())


def test_a_part_that_fails_is_reported_and_the_next_runs(tmp_path: Path) -> None:
    found = run(job(tmp_path, "decode", "floors"))
    assert "WeightsError" in found["decode"]["failed"]
    assert "Traceback" in found["decode"]["traceback"]
    assert found["floors"]["linear_graph_s"]["1"] > 0


def test_a_part_that_hangs_is_killed_and_the_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = importlib.import_module("decode_gpu")
    monkeypatch.setattr(program, "LIMITS", {"check": 0.0})
    monkeypatch.setattr(program, "EXIT_S", 0.0)
    shapes: dict[str, Any] = {}
    benchmark = program.Benchmark([], "cpu", tmp_path, tmp_path / "out.json", time.monotonic() + 60)
    benchmark.result = {"shapes": {"tiny": shapes}}
    benchmark._child(benchmark._job("tiny", ["check", "floors"]), shapes)
    assert shapes["check"]["failed"].startswith("killed after")
    assert "failed" not in shapes["floors"]
    assert json.loads((tmp_path / "out.json").read_text())["shapes"]["tiny"]["floors"] == shapes["floors"]


def test_the_program_measures_a_server_and_writes_the_file(tmp_path: Path, checkpoints: Path) -> None:
    words = ["--shapes", "tiny", "--device", "cpu", "--parts", "http", "--no-check", "--commit", "abc"]
    where = ["--folder", str(checkpoints), "--out", str(tmp_path / "r.json")]
    command = [sys.executable, str(FOLDER / "decode_gpu.py"), *words, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["environment"]["commit"] == "abc"
    level = result["shapes"]["tiny"]["http"]["throughput"]
    assert (level["answers"], level["completion_tokens"]) == (3, 36)
    assert result["shapes"]["tiny"]["summary"]["http"]["of_offline"] > 0
    assert "of offline" in done.stdout
    assert (checkpoints / "tiny").is_dir(), "a folder that was given is kept"
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith("caches")] == []
