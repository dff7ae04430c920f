"""What the benchmark programs share: facts about the machine and the code, percentiles, tables, result files.

A result file is ``benchmarks/results/NAME.json``: ``{"name", "environment", "settings", "results"}``. It names no host,
user or folder.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["RESULTS", "environment", "percentiles", "table", "write_result"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
"""Instruction sets that decide how fast a model runs on a CPU."""


def environment(packages: Sequence[str] = ("torch", "transformers")) -> dict[str, Any]:
    """Machine, interpreter, versions of *packages* (those that are installed), commit and time."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "gpu": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: version for name in packages if (version := _version(name))},
        "commit": _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def percentiles(values: Iterable[float], points: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": …, "mean": …, "min": …, "max": …, "count": …}`` of *values*, which must not be empty.

    Linear interpolation between the two nearest ranks (numpy's default).
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values to summarise")
    found = {f"p{point}": _quantile(ordered, point / 100) for point in points}
    mean = statistics.fmean(ordered)
    return {**found, "mean": mean, "min": ordered[0], "max": ordered[-1], "count": len(ordered)}


def table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], digits: int = 2) -> None:
    """Print *rows* with the chosen *columns*; floats are rounded to *digits*."""
    drawn = Table(title=title)
    for column in columns:
        drawn.add_column(column, justify="right")
    for row in rows:
        drawn.add_row(*(_cell(row.get(column, ""), digits) for column in columns))
    Console().print(drawn)


def write_result(name: str, results: Any, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
    """Write ``results/NAME.json``. *facts*: what :func:`environment` said before the run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"name": name, "environment": facts, "settings": dict(settings), "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    Console().print(f"wrote {path.relative_to(ROOT)}")
    return path


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    for line in info.read_text().splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "model": facts.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[str]:
    return _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, with ``+changes`` when tracked source files differ from it; ``unknown`` outside a checkout."""
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return (commit or "unknown") + ("+changes" if changed else "")


def _output(*command: str) -> str:
    """What *command* prints, run in the checkout; ``""`` when it is not installed or fails, for facts that may lack."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
