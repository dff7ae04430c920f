"""The benchmark of pictures: its parts on a tiny shape on the CPU, and what it makes of their figures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"

pytestmark = pytest.mark.usefixtures("benchmark_modules")


def measured(tmp_path: Path, shape: str, parts: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    words = ["--shapes", shape, "--parts", parts, "--device", "cpu", "--at-once", "1,2", "--rounds", "1"]
    command = [sys.executable, str(FOLDER / "image_gpu.py"), *words, "--out", str(out), "--limit", "240"]
    nothing_installed = {**os.environ, "MSTAR_PLUGINS": ""}  # as on machines where all is on the path alone
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=nothing_installed)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["settings"]["parts"] == parts
    results: dict[str, Any] = found["results"][shape]
    return results


@pytest.mark.timeout(300)
def test_parts_of_a_tiny_shape(tmp_path: Path) -> None:
    results = measured(tmp_path, "tiny", "plain,graphs,floor,timeline,load,vae,diffusers")
    ran = [part for part in results if part != "derived"]
    assert ran == ["floor", "graphs", "timeline", "load", "plain", "vae", "diffusers"], "what is worth most comes first"
    for part in ("plain", "graphs", "diffusers"):
        assert results[part]["latency_s"] > 0
        assert results[part]["pictures_per_s_2"] > 0
    assert results["graphs"]["psnr_db"] == 99, "the same seeds and weights give the same pictures"
    floor = results["floor"]
    # two blocks of each kind (8 products and one attention, 2 and one) and 8 products around them
    assert floor["calls"] == 2 * 9 + 2 * 3 + 8, "layers of all kinds are in the floor"
    for name in ("step_floor_s", "products_s", "attention_s", "cold_products_s", "cold_attention_s"):
        assert floor[name] > 0
    assert floor["plain_float32_db"] == 99, "on the CPU the plain step is in float32"
    timeline = results["timeline"]
    steps = ["text_encoder", "dit.prepare", "dit.step", "dit.step", "vae_decoder"]
    assert [step["step"] for step in timeline["steps"]] == steps
    counted = sum(timeline["stages"].values()) + sum(timeline[part] for part in ("before", "wait", "gaps", "out"))
    assert counted == pytest.approx(timeline["total"], abs=0.5), "nothing is left over"
    load = results["load"]["2"]
    assert sum(step["rows"] * step["times"] for step in load["steps"] if step["step"] == "dit.step") == 2 * 2
    assert 0 < load["busy"] <= 1
    assert results["floor"]["plain_step_s"] > 0
    assert results["vae"]["plain_s"] > 0
    derived = {"over_diffusers", "share_of_floor", "floor_s_a_step", "plain_share_of_floor"}
    assert derived <= results["derived"].keys()


@pytest.mark.timeout(300)
def test_over_http(tmp_path: Path) -> None:
    results = measured(tmp_path, "tiny-z-image", "http")
    assert results["http"]["latency_s"] > results["http"]["encode_s"] > 0


def test_what_breaks_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "image_gpu.py"), "--shapes", "tiny", "--device", "cpu", "--out", str(out)]
    words = ["--parts", "vae", "--limit", "0.01"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "took longer" in json.loads(out.read_text())["results"]["tiny"]["vae"]["error"][0]
    done = subprocess.run([*command, "--parts", "strange"], capture_output=True, text=True, check=False)
    assert (done.returncode, "unknown parts strange" in done.stderr) == (2, True)


_HOLDS_ON = """
import subprocess, sys, time
from pathlib import Path
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=APART)
Path(sys.argv[sys.argv.index("--out") + 1]).with_suffix(".pid").write_text(str(left.pid))
if APART:
    time.sleep(600)
"""


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_part_leaves_running_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """A server that its part leaves behind holds the part's pipe, and the device. *apart*: in a session of its own,
    of a part that hangs."""
    program = importlib.import_module("image_gpu")
    script = tmp_path / "script.py"
    script.write_text(_HOLDS_ON.replace("APART", str(apart)))
    monkeypatch.setattr(program, "__file__", str(script))
    args = argparse.Namespace(device="cpu", at_once="1", rounds=1, limit=4.0)
    child = program._start("tiny", "http", str(tmp_path), args)
    assert "took longer than 4 s" in program._finish(child, tmp_path / "http.json", args)["error"][0]
    try:
        left = os.pidfd_open(int((tmp_path / "http.pid").read_text()))
    except ProcessLookupError:
        return
    with open(left) as ended:
        poller = select.poll()  # unlike select(), of descriptors with any number
        poller.register(ended)
        assert poller.poll(30_000)


def test_a_timeline_is_cut_into_stages() -> None:
    timeline = importlib.import_module("image.timeline")

    def span(track: int, name: str, began: float, ended: float, **said: Any) -> dict[str, Any]:
        times = {"ts": began * 1e3, "dur": (ended - began) * 1e3}
        return {"ph": "X", "tid": track, "name": name, "args": said, **times}

    denoise = {"entry": "step", "captured": True, "ahead": True, "rows": 1}
    events = [
        span(2, "dit", 900, 950, entry="step"),  # of a request before
        {"ph": "b", "name": "request", "ts": 1010e3, "id": "r"},
        span(2, "text_encoder", 1012, 1020, entry="forward", captured=False),
        span(1, "step", 1010, 1100),
        span(1, "land", 1019, 1021),
        span(1, "route", 1021, 1024),
        span(2, "dit", 1023, 1080, **denoise),
        span(2, "dit", 1080, 1137, **denoise),
        span(2, "vae_decoder", 1137, 1170, entry="forward", captured=True),
    ]
    found = timeline.digest(events, timeline.Asked(1.0, 1.172, 0.008))
    assert found["stages"] == {"text": 8, "denoise": 114, "decode": 33}
    parts = {name: found[name] for name in ("total", "before", "prepare", "wait", "gaps", "out")}
    assert parts == pytest.approx({"total": 172, "before": 10, "prepare": 8, "wait": 2, "gaps": 3, "out": 2})
    second = found["steps"][1]
    assert second["host"] == pytest.approx({"land": 1, "route": 2}), "what the host did in the gap before it"
    assert (second["step"], second["gap"], second["captured"]) == ("dit.step", 3, True)
    assert sum(row["ms"] for row in timeline.stages(found)) == pytest.approx(172)
    with pytest.raises(RuntimeError, match="no step"):
        timeline.digest(events, timeline.Asked(2.0, 3.0, 0.0))


def test_steps_under_load_are_counted_by_their_rows() -> None:
    load = importlib.import_module("image.load")

    def span(began: float, rows: int, captured: bool, ms: float = 100, track: int = 2) -> dict[str, Any]:
        said = {"entry": "step", "rows": rows, "captured": captured}
        return {"ph": "X", "tid": track, "name": "dit", "args": said, "ts": began * 1e6, "dur": ms * 1e3}

    events = [
        span(0.9, 4, True),  # of requests before
        *(span(1.0 + number / 10, 4, True, 80 + 10 * number) for number in range(3)),
        span(1.5, 1, False, 50),
        span(1.5, 1, False, 50, track=1),
    ]
    found = load.steps_of(events, 1.0, 1.8)
    assert found["total_ms"] == pytest.approx(800)
    assert found["busy"] == pytest.approx(0.32 / 0.8)
    assert found["steps"] == [
        {"step": "dit.step", "rows": 4, "captured": True, "times": 3, "ms": 90, "ms_a_row": 22.5},
        {"step": "dit.step", "rows": 1, "captured": False, "times": 1, "ms": 50, "ms_a_row": 50},
    ]


def test_figures() -> None:
    figures = importlib.import_module("image.figures")
    grey = np.full((4, 4, 3), 100, np.uint8)
    assert figures.psnr(grey, grey) == 99
    assert figures.psnr(grey, grey + 1) == pytest.approx(48.13, abs=0.01)
    results: dict[str, Any] = {
        "graphs": {"latency_s": 0.5},
        "floor": {"step_floor_s": 0.08, "steps": 4, "captured_step_s": 0.1},
        "vae": {"plain_s": 0.11},
        "vae-compiled": {"plain_s": 0.11, "compiled_s": 0.1},
        "diffusers-compiled": {"latency_s": 0.6},
        "http": {"latency_s": 0.51, "encode_s": 0.005},
    }
    figures.derive(results, Path("nowhere"), ("graphs", "plain"))
    derived = results["derived"]
    assert derived["share_of_floor"] == pytest.approx(4 * 0.08 / 0.4)
    assert derived["captured_share_of_floor"] == pytest.approx(0.8)
    assert derived["over_compiled_diffusers"] == pytest.approx(1.2)
    assert derived["http_over_offline"] == pytest.approx(1.02)
    assert derived["http_over_encoded"] == pytest.approx(0.51 / 0.505)
