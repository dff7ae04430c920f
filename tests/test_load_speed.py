"""The loading benchmark measures what it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.skipif(sys.platform != "linux", reason="drops files from Linux's cache and reads /proc")
def test_every_way_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    program = importlib.import_module("load_speed")
    monkeypatch.setattr(program, "in_a_process", program.measure)
    size = program.write(tmp_path, layers=1).stat().st_size
    assert size == pytest.approx(program.LAYER_BYTES, rel=0.001)
    found = list(program.rounds("cpu", tmp_path, layers=1, runs=2))
    assert {(row["from"], row["way"]) for row in found} == {
        (source, way) for source in ("disk", "cache") for way in ("plain", "bfloat16", "float32")
    }
    for row in found:
        assert row["mb_per_s"] == max(row["all_mb_per_s"]) == pytest.approx(size / 1e6 / row["seconds"])
        assert len(row["all_mb_per_s"]) == 2
        assert ("peak_mb" in row) == (row["way"] != "plain")
