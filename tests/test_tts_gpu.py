"""The benchmark of speech: its parts on tiny models on the CPU, and what a listener would have heard."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"

pytestmark = pytest.mark.usefixtures("benchmark_modules")


@pytest.mark.timeout(300)
def test_tiny_models(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--tiny", "--device", "cpu", "--families", "orpheus,kokoro", "--seconds", "0.7", "--rounds", "1"]
    command = [sys.executable, str(FOLDER / "tts_gpu.py"), *words, "--streams", "1,2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    families: dict[str, Any] = json.loads(out.read_text())["families"]
    for found in families.values():
        assert found["check"]["repeated"] == 0
        for row, streams in zip(found["rows"], (1, 2), strict=True):
            assert row["streams"] == streams
            for load in (row["burst"], row["steady"]):
                assert 0 < load["first_audio_ms"]["p50"] <= load["first_audio_ms"]["p95"]
                assert load["first_audio_ms"]["count"] == streams
                assert load["audio_s_per_s"] > 0
                assert 0 <= load["gapless"] <= 1
    assert families["orpheus"]["check"]["codec"] == 0
    assert families["orpheus"]["floors"]["audio_s_per_s"].keys() == {"1", "2"}
    assert all(row["of_floor"] > 0 for row in families["orpheus"]["rows"])


@pytest.mark.timeout(300)
def test_the_codec_apart_is_served_beside_one_process(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--tiny", "--device", "cpu", "--streams", "2", "--seconds", "0.7", "--rounds", "1", "--out", str(out)]
    command = [sys.executable, str(FOLDER / "codec_apart.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["check"]["apart"] == 0
    assert [row["layout"] for row in found["rows"]] == ["one process", "codec_apart"]
    assert all(row["steady"]["first_audio_ms"]["count"] == 2 for row in found["rows"])
    assert [len(status["ranks"]) for status in found["status"].values()] == [0, 1]
    assert found["status"]["codec_apart"]["ranks"][0]["steps"] > 4


def heard(*arrivals: tuple[float, float]) -> Any:
    """*arrivals*: (when, seconds of sound)."""
    streams = importlib.import_module("speech.streams")
    return streams.Heard(0.0, [(when, round(seconds * streams.RATE)) for when, seconds in arrivals])


def test_a_gap_is_how_long_a_player_waits() -> None:
    playback = importlib.import_module("speech.streams").playback
    assert playback(heard((1.0, 0.5))) == 0
    assert playback(heard((1.0, 0.5), (1.2, 0.5), (1.9, 0.5))) == 0
    assert playback(heard((1.0, 0.5), (1.75, 0.5), (2.0, 0.5))) == pytest.approx(0.25)
    assert playback(heard((1.0, 0.5), (1.6, 0.5), (2.3, 0.5))) == pytest.approx(0.3)


def test_simulated_listeners_hear_held_pieces_later(tmp_path: Path) -> None:
    """Steps of 7 ms where a code plays 12."""
    rows = {}
    for name, more in {"held": [], "at once": ["--no-preroll"]}.items():
        words = ["--streams", "4", "--seconds", "1.2", "--rounds", "1", "--lm", "7,0,0", "--codec", "9,0,0", *more]
        importlib.import_module("listeners").main([*words, "--stalls", "0", "--out", str(tmp_path / "out.json")])
        (rows[name],) = json.loads((tmp_path / "out.json").read_text())["rows"]
    held, at_once = rows["held"]["steady"], rows["at once"]["steady"]
    assert held["first_audio_ms"]["p50"] > at_once["first_audio_ms"]["p50"] + 7
    assert held["late_ms"]["p95"] <= at_once["late_ms"]["p95"]
    assert held["real_time_factor"]["p50"] < 1


def test_drawn_weights_ask_for_codes_in_order() -> None:
    """At the published vocabulary: whatever else a layer adds, the likeliest token is one of the next place."""
    families = importlib.import_module("speech.families")
    from mstar_tts.orpheus.tokens import FRAME, OrpheusTokens

    tokens, width = OrpheusTokens(), 64
    embedding, head = (torch.randn(156_940, width) * width**-0.5 for _ in range(2))
    families._speak_in_order("", "model.embed_tokens.weight", embedding)
    families._speak_in_order("", "lm_head.weight", head)
    token, random = tokens.before_speech[-1], torch.Generator().manual_seed(1)
    for step in range(3 * FRAME):
        hidden = embedding[token] + torch.randn(width, generator=random)
        token = int((head @ (hidden / hidden.square().mean().sqrt())).argmax())
        first, behind = tokens.ranges[step % FRAME]
        assert first <= token < behind
