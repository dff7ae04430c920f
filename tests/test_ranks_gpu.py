"""The program that measures several GPUs, on the CPU: its parts check what they measure, and failures are told."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "ranks_gpu", raising=False)
    return importlib.import_module("ranks_gpu")


def test_pages_arrive(program: ModuleType, tmp_path: Path) -> None:
    found = program.run_part("transfer", ("tiny",), "cpu", 2, tmp_path, limit=120)
    (row,) = found["tiny"]["rows"]
    assert row["tokens"] == 64
    assert row["bytes"] == 64 * found["tiny"]["kv_bytes_a_token"]


def test_values_come_back_by_each_way(program: ModuleType, tmp_path: Path) -> None:
    found = program.run_part("values", (), "cpu", 2, tmp_path, limit=120)
    assert [row["bytes"] for row in found["rows"]] == [4 << 10, 256 << 10, 16 << 20]
    assert all(row["shm_us"] > 0 and row["gloo_us"] > 0 for row in found["rows"])


def test_one_rank_of_two_decodes_by_itself(program: ModuleType, tmp_path: Path) -> None:
    found = program.run_part("echo", ("tiny",), "cpu", 1, tmp_path, limit=120)
    assert [row["batch"] for row in found["tiny"]["rows"]] == [1, 3]
    assert all(row["divided_s"] > 0 for row in found["tiny"]["rows"])


def test_a_part_that_cannot_be_is_told(program: ModuleType, tmp_path: Path) -> None:
    found = program.run_part("transfer", ("tinny",), "cpu", 2, tmp_path, limit=120)
    assert "tinny" in found["failed"]
