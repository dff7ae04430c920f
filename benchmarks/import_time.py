"""How long the command line takes to start: ``python benchmarks/import_time.py [--runs N] [--plugins N]``.

Promise P1: ``mstar --help`` and ``mstar models`` answer in under 0.5 s with ten plugins installed. Each run is a fresh
process. The plugins are distributions with one model and one command each, written to a temporary folder, beside those
that are installed. The figures go to ``benchmarks/results/import_time.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COMMANDS = (("--help",), ("models",), ("plugins",))
LIMIT_S = 0.5

PLUGIN = '''
import mstar
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef

class Knobs(SamplingKnobs):
    """Knobs of its own, as a family has."""

    voice: str = "one"

@mstar.hookimpl
def mstar_models():
    return [
        ModelSpec(
            key="bench-{n}", family="bench", summary="For the benchmark.", weights=(WeightsRef("hub", "a/b"),),
            licence=Licence("Apache-2.0"), model="nowhere:Model", processor="nowhere:Processor", knobs=Knobs,
        )
    ]

@mstar.hookimpl
def mstar_cli(commands):
    commands.add("bench-{n}", print, help="For the benchmark.")
'''


def write_plugins(folder: Path, count: int) -> None:
    """*count* installed distributions, as an installer leaves them."""
    for n in range(count):
        (folder / f"mstar_bench_{n}.py").write_text(PLUGIN.replace("{n}", str(n)))
        info = folder / f"mstar_bench_{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: mstar-bench-{n}\nVersion: 1.0\nRequires-Dist: mstar-core>=0.1\n"
        )
        (info / "entry_points.txt").write_text(f"[mstar.plugins]\nbench{n} = mstar_bench_{n}\n")


def measure(words: tuple[str, ...], runs: int, environ: dict[str, str]) -> dict[str, Any]:
    """Seconds from the start of the process to its end, and of processor time, which a busy machine changes less. The
    first run, which writes bytecode, does not count."""
    code = "import os, sys; from mstar.cli.app import run; sys.exit(run(sys.argv[1:], os.environ))"
    seconds, processor = [], []
    for _ in range(runs + 1):
        began, used = time.perf_counter(), processor_seconds()
        subprocess.run([sys.executable, "-c", code, *words], env=environ, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
        processor.append(processor_seconds() - used)
    kept = sorted(seconds[1:])
    return {
        "command": "mstar " + " ".join(words),
        "median_s": statistics.median(kept),
        "min_s": kept[0],
        "max_s": kept[-1],
        "processor_median_s": statistics.median(processor[1:]),
    }


def processor_seconds() -> float:
    """Processor time, user and system, of all processes that this one has started and seen end."""
    times = os.times()
    return times.children_user + times.children_system


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--plugins", type=int, default=10)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "import_time.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), arguments.plugins)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "PYTHONPATH": path}
        figures = [measure(words, arguments.runs, environ) for words in COMMANDS]
    for figure in figures:
        slow = figure["median_s"] > LIMIT_S
        times = f"median {figure['median_s']:.3f} s, processor {figure['processor_median_s']:.3f} s"
        print(f"{figure['command']:16} {times}{'  over the limit' if slow else ''}")
    result = {
        "benchmark": "import_time",
        "commit": commit(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "plugins": arguments.plugins,
        "limit_s": LIMIT_S,
        "figures": figures,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(figure["median_s"] > LIMIT_S for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
