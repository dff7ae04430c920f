"""How long the command line takes to start: ``python benchmarks/import_time.py [--runs N] [--plugins N]``.

Promise P1: ``mstar --help`` and ``mstar models`` answer in under 0.5 s with ten plugins installed. Each run is a fresh
process. The plugins are distributions with one model and one command each, written to a temporary folder, beside those
that are installed. The figures go to ``benchmarks/results/import_time.json``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import environment, percentiles, table, write_result

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
    return {
        "command": "mstar " + " ".join(words),
        "seconds": percentiles(seconds[1:]),
        "processor_seconds": percentiles(processor[1:]),
    }


def processor_seconds() -> float:
    """Processor time, user and system, of all processes that this one has started and seen end."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--plugins", type=int, default=10)
    options = parser.parse_args()
    facts = environment(packages=())
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), options.plugins)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        figures = [measure(words, options.runs, {**os.environ, "PYTHONPATH": path}) for words in COMMANDS]
    rows = [
        {"command": f["command"], "p50": f["seconds"]["p50"], "processor p50": f["processor_seconds"]["p50"]}
        for f in figures
    ]
    table(f"seconds with {options.plugins} plugins; the limit is {LIMIT_S}", rows, list(rows[0]), digits=3)
    settings = {"runs": options.runs, "plugins": options.plugins, "limit_s": LIMIT_S}
    write_result("import_time", figures, settings, facts)
    return int(any(row["p50"] > LIMIT_S for row in rows))


if __name__ == "__main__":
    sys.exit(main())
