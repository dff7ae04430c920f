"""``mstar simulate``: a profile measured, fitted, run; and what is wrong with what was typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.cli import simulate
from mstar.simulate.fleet import ROUTERS
from mstar.simulate.profile import Profile, write_profile

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    costs = {"llm": {"step": 0.01, "token": 0.001}}
    write_profile(Profile(model="m", costs=costs, max_step_tokens=100, kv_tokens=3200, ranks=2), path)
    return str(path)


def test_a_drawn_load_is_run(mstar: Run, profile: str) -> None:
    words = ("--rate", "20", "--requests", "50", "--prompt", "60", "--output", "10", "--replicas", "3")
    status, out, _ = mstar("simulate", "run", profile, *words)
    assert status == 0
    assert "3 replicas on 6 devices of m" in out
    assert "50 requests done, 0 refused" in out
    assert "first token" in out
    status, out, _ = mstar("simulate", "run", profile, *words, "--json", "--ranks", "1")
    answer = json.loads(out)
    assert (answer["completed"], answer["devices"]) == (50, 3)
    assert answer["between_tokens"]["p50"] == pytest.approx(0.011, rel=0.2)


def test_the_help_names_every_router() -> None:
    assert tuple(ROUTERS) == simulate._ROUTERS


def test_a_load_is_read(mstar: Run, profile: str, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"at": 1, "prompt": 10, "output": 1}\n{"at": 0, "prompt": 10, "output": 1}\n')
    status, out, _ = mstar("simulate", "run", profile, "--load", str(load), "--json")
    answer = json.loads(out)
    assert (status, answer["completed"]) == (0, 2)
    assert answer["between_tokens"]["p50"] is None  # there are none


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"at": 1.8e12}, "'at' must be a number of seconds, from 0 to 1e+10"),  # milliseconds
        ({"limit": 3, "output": 50}, "'limit' is 3, and 'output' 50"),
    ],
)
def test_a_load_that_no_server_could_be_sent_is_refused(
    mstar: Run, profile: str, tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text(json.dumps({"at": 0, "prompt": 10, "output": 1, **fields}))
    status, out, err = mstar("simulate", "run", profile, "--load", str(load))
    assert (status, out) == (2, "")
    assert f"{load}:1: {said}" in err


def test_the_example_of_a_request_can_be_pasted(mstar: Run, profile: str, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text("[0.5, 300, 100]")
    _, _, err = mstar("simulate", "run", profile, "--load", str(load))
    load.write_text(err.partition("as in ")[2])
    status, out, _ = mstar("simulate", "run", profile, "--load", str(load), "--json")
    assert (status, json.loads(out)["completed"]) == (0, 1)


def test_results_of_a_benchmark_become_a_profile(mstar: Run, tmp_path: Path) -> None:
    out_file = tmp_path / "llama.json"
    results = str(ROOT / "benchmarks/results/decode_gpu_llama-3.2-3b.json")
    status, out, _ = mstar("simulate", "fit", results, "--out", str(out_file), "--kv-tokens", "500000")
    assert (status, out.startswith(f"wrote {out_file}: learned from ")) == (0, True)
    assert json.loads(out_file.read_text())["kv_tokens"] == 500_000
    status, out, _ = mstar("simulate", "run", str(out_file), "--rate", "10", "--requests", "20", "--json")
    assert json.loads(out)["first_token"]["p50"] < 0.05


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "PROFILE"), "--rate PER_S draws one"),
        (("run", "PROFILE", "--rate", "1", "--load", "l"), "leave --rate out"),
        (("run", "PROFILE", "--load", "l", "--prompt", "5", "--requests", "2"), "leave --requests, --prompt out"),
        (("run", "PROFILE", "--rate", "1", "--router", "lest"), "did you mean 'least'"),
        (("run", "PROFILE", "--rate", "1", "--prompt", "5000"), "a replica has 50"),
        (("run", "PROFILE", "--rate", "1", "--spread", "9"), "from 0 to 3"),
        (("run", "PROFILE", "--rate", "0"), "'0' is not a number of requests a second"),
        (("run", "PROFILE", "--rate", "1e-300"), "from 1e-6 to 1e9"),
        (("run", "PROFILE", "--rate", "1", "--replicas", "1000000000"), "100,000 at most"),
        (("run", "PROFILE", "--rate", "1", "--requests", "1000000000"), "10,000,000 at most"),
        (("run", "nothing.json", "--rate", "1"), "nothing.json: No such file"),
        (("fit", "nothing.json"), "--out FILE.json"),
        (("fit", "nothing.json", "--out", "f"), "nothing.json: No such file"),
        (("measure", "toy-chat"), "--out FILE.json"),
        (("measure", "toy-chatt", "--out", "f"), "did you mean 'toy-chat'"),
        (("play", "x"), "'play' is not a valid value"),
    ],
)
def test_what_is_wrong_is_said(mstar: Run, profile: str, words: tuple[str, ...], said: str) -> None:
    status, out, err = mstar("simulate", *(profile if word == "PROFILE" else word for word in words))
    assert (status, out) == (2, "")
    assert said in err
