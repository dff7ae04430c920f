"""Learning what steps cost: from samples, from a benchmark's results, from a running engine; files and their faults."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from mstar.simulate.cost import Sample, StepCost, StepShape, fit
from mstar.simulate.load import Asked, read_load, write_load
from mstar.simulate.measure import prompt_shapes
from mstar.simulate.profile import Profile, read_profile, write_profile
from mstar.simulate.results import read_results
from mstar.spec.errors import SetupError

ROOT = Path(__file__).parents[3]
TRUE = StepCost({"step": 2e-3, "row": 1e-5, "token_over_256": 2.5e-5, "context": 2.7e-8, "pair": 1e-9})


def test_costs_are_learned_from_noisy_steps() -> None:
    draw = random.Random(0)
    samples = []
    for rows in (1, 4, 16, 64, 128):
        for context in (100, 2000):
            shape = StepShape(rows, rows, rows * context)
            samples.append(Sample(TRUE.seconds(shape) * draw.uniform(0.98, 1.02), [shape]))
    for prompt in (64, 512, 2048, 8192):
        steps = [*prompt_shapes(prompt, 1024)]
        seconds = sum(map(TRUE.seconds, steps)) + 4e-3
        samples.append(Sample(seconds * draw.uniform(0.98, 1.02), steps, 1))
    learned = fit(samples)
    assert learned.median_error < 0.02
    assert learned.largest_error < 0.06
    assert learned.request_s == pytest.approx(4e-3, rel=0.4)
    for shape in (StepShape(32, 32, 32_000), StepShape(9, 1024, 10_000, 600_000)):
        assert learned.cost.seconds(shape) == pytest.approx(TRUE.seconds(shape), rel=0.12)


def test_chunks_of_a_prompt_see_what_came_before() -> None:
    shapes = [*prompt_shapes(250, 100)]
    assert [(s.rows, s.tokens, s.context) for s in shapes] == [(1, 100, 100), (1, 100, 200), (1, 50, 250)]
    assert sum(shape.pairs for shape in shapes) == 250 * 251 / 2


def test_results_of_the_gpu_benchmark_are_learned_from() -> None:
    """The file in this repository: a 3B model on an H200."""
    results = read_results(ROOT / "benchmarks/results/decode_gpu_llama-3.2-3b.json")
    assert results.shape == "llama-3.2-3b"
    assert "H200" in results.device
    learned = fit(results.samples, results.known)
    assert learned.cost.parts["context"] == pytest.approx(114688 / 4.3e12, rel=0.05)
    assert learned.median_error < 0.05
    assert learned.cost.seconds(StepShape(1, 1, 1089)) == pytest.approx(2.06e-3, rel=0.1)


def test_files_of_results_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for text, words in (
        ("{", "no JSON"),
        ("{}", "no measurements"),
        ('{"shapes": {"a": {}, "b": {}}}', "--shape a or b"),
        ('{"shapes": {"a": {}}}', "has 0 measurements"),
    ):
        path.write_text(text)
        with pytest.raises(SetupError, match=words):
            read_results(path)
    path.write_text('{"shapes": {"llama": {}}}')
    with pytest.raises(SetupError, match="did you mean 'llama'"):
        read_results(path, "lama")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("decode", {"batch": "8"}, "decode, row 1: 'batch' is '8'; it must be a whole number from 1 to 10,000,000"),
        ("decode", {"context": None}, "decode, row 1: 'context' is None; it must be a number, 0 or more"),
        ("decode", {"step_s": 0}, "decode, row 1: 'step_s' is 0; it must be a number of seconds, more than 0"),
        ("decode", {"step_s": math.nan}, "decode, row 1: 'step_s' is nan"),
        ("prefill", {"tokens": 0}, "prefill, row 1: 'tokens' is 0"),
        ("prefill", {"seconds": True}, "prefill, row 1: 'seconds' is True"),
        ("load", {"streams": -1}, "load, row 1: 'streams' is -1"),
    ],
)
def test_a_number_of_results_that_is_none_is_named(
    tmp_path: Path, part: str, change: dict[str, object], words: str
) -> None:
    rows = {
        "decode": {"batch": 8, "context": 100, "step_s": 0.1},
        "prefill": {"tokens": 100, "seconds": 0.1},
        "load": {"streams": 2, "prompt": 10, "prompts_s": 0.1},
    }
    path = tmp_path / "r.json"

    def write(rows: dict[str, dict[str, object]]) -> None:
        path.write_text(json.dumps({"shapes": {"a": {name: {"rows": [row]} for name, row in rows.items()}}}))

    write(rows)
    assert len(read_results(path).samples) == 3
    write({**rows, part: {**rows[part], **change}})
    with pytest.raises(SetupError, match=words):
        read_results(path)
    kept = {name: value for name, value in rows[part].items() if name not in change}
    write({**rows, part: kept})
    with pytest.raises(SetupError, match=r"is missing|has 2 measurements"):
        read_results(path)


@pytest.mark.parametrize("found", ["[]", '"x"', "null"])
def test_a_shape_that_is_no_mapping_has_no_measurements(tmp_path: Path, found: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(f'{{"shapes": {{"a": {found}}}, "environment": []}}')
    with pytest.raises(SetupError, match="a has 0 measurements"):
        read_results(path)


def test_a_profile_comes_back_and_faults_are_named(tmp_path: Path) -> None:
    profile = Profile(model="m", costs={"llm": {"step": 0.1}}, max_step_tokens=64, kv_tokens=1000)
    path = tmp_path / "p.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    written = json.loads(path.read_text())
    for change, words in (
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"costs": {"llm": {"steps": 1}}}, "no part 'steps'"),
        ({"costs": {}}, "'llm' is missing"),
        ({"replicas": 3}, "replicas"),
        ({"costs": {"llm": {"step": 1e308}}}, "'step' of a step's cost is 1e\\+308: it must be .* from 0 to 1e\\+06"),
        ({"request_s": 1e308}, "request_s: Input should be less than or equal to 1000000"),
        ({"error": {"median": math.nan}}, "error.median: Input should be a finite number"),
    ):
        path.write_text(json.dumps(written | change))
        with pytest.raises(SetupError, match=words):
            read_profile(path)
    path.write_text("no")
    with pytest.raises(SetupError, match="mstar simulate measure"):
        read_profile(path)


def test_a_load_comes_back_and_faults_are_named(tmp_path: Path) -> None:
    load = [Asked(0.5, 3, 4, limit=9, tenant="a", priority=2, before=(("encoder", 15),)), Asked(1.0, 5, 6)]
    path = tmp_path / "l.jsonl"
    write_load(load[::-1], path)
    assert read_load(path) == load
    for line, words in (
        ("", "no request"),
        ("[" * 100_000, ":1: maximum recursion depth"),
        ("{", ":1: "),
        ("[]", "an object"),
        ('{"at": 1, "prompt": 2}', "'output' is missing"),
        ('{"at": -1, "prompt": 2, "output": 1}', "'at' must be"),
        ('{"at": 1, "prompt": 0, "output": 1}', "'prompt' must be"),
        ('{"at": 1, "prompt": 1, "output": 1, "limt": 3}', "did you mean 'limit'"),
        ('{"at": 1, "prompt": 1, "output": 1, "before": ["vit"]}', "list of pairs"),
        (f'{{"at": 1, "prompt": 1, "output": 1, "before": [["vit", {10**400}]]}}', "list of pairs"),
        ('{"at": 1, "prompt": 1, "output": 1, "tenant": 3}', "'tenant' is a text"),
    ):
        path.write_text(line)
        with pytest.raises(SetupError, match=words):
            read_load(path)
