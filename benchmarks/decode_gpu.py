"""Decode on a GPU: the engine against what the device allows, against transformers, offline and over HTTP.

    python benchmarks/decode_gpu.py --out FILE.json                       # everything, in at most eight minutes
    python benchmarks/decode_gpu.py --shapes qwen3-0.6b --parts floors,decode --out FILE.json
    python benchmarks/decode_gpu.py --shapes tiny --device cpu --out FILE.json    # does it work? no figures

Models have random weights at published shapes, which are written to a folder first. Each group of parts runs in a
process of its own: what breaks or hangs is reported, and the next goes on. The file is written after each part.

Parts: ``check`` (parity, always first), ``floors``, ``decode``, ``prefill``, ``host``, ``load`` (whole runs offline;
``http`` and ``peer`` are compared with it), ``timeline`` (kernels and idle time of decode), ``startup`` and ``http``
(``mstar serve``), ``peer`` (transformers; in the file it is ``continuous`` and ``static``). NOTES.md says what each
figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from common import environment
from gpu.child import Job, failure
from gpu.deploy import deployment
from gpu.report import derive, print_report, write
from gpu.serving import ShapeServer, evict, http, start
from gpu.shapes import SHAPES, sizes_of

__all__ = ["Benchmark", "main"]

PARTS = ("check", "floors", "decode", "prefill", "host", "load", "timeline", "startup", "http", "peer")
"""In the order in which they run."""
GROUPS = (("floors",), ("decode", "prefill", "host", "load", "timeline"), ("continuous",), ("static",))
"""Parts that share a process: those of a group share a loaded engine."""
NEEDS = {"http": ("load",), "peer": ("load",), "decode": ("timeline",)}
LIMITS = {"weights": 120, "check": 240, "floors": 60, "decode": 240, "static": 240, "startup": 300}
"""Seconds that a part may take; 120 where nothing is said. A start counts by itself."""
LEAST_S = 5.0
"""With less time left than this, nothing new is begun."""
EXIT_S = 2.0
MEASURED = ("llama-3.2-3b", "qwen3-0.6b", "qwen3-8b")
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numba", "numpy", "mstar-core", "mstar-server")


@dataclass
class Benchmark:
    """One run. *until*: when it must have ended (``time.monotonic``)."""

    parts: Sequence[str]
    device: str
    folder: Path
    out: Path
    until: float
    batches: Sequence[int] = ()
    deployment: dict[str, Any] = field(default_factory=dict)
    keep: bool = False
    result: dict[str, Any] = field(default_factory=dict)

    def run(self, shapes: Sequence[str]) -> None:
        for number, shape in enumerate(shapes):
            if number == 0 and "check" in self.parts:
                # one published shape is enough: the smallest that is asked for
                checked = min(shapes, key=lambda name: SHAPES[name].read_bytes)
                self._child(self._job(checked, ["check"]), self.result)
            found = self.result["shapes"].setdefault(shape, {})
            self._shape(shape, found, first=number == 0)
            if not self.keep:
                shutil.rmtree(self.folder / shape, ignore_errors=True)

    def _job(self, shape: str, parts: Sequence[str]) -> Job:
        return Job(shape, parts, self.device, str(self.folder), "", self.batches, self.deployment)

    def _shape(self, shape: str, found: dict[str, Any], first: bool) -> None:
        asked = {*self.parts, *(("static", "continuous") if "peer" in self.parts else ())}
        groups = [[part for part in group if part in asked] for group in GROUPS]
        serving = [part for part in ("startup", "http") if part in self.parts and (first or part == "http")]
        if serving or any(group != ["floors"] for group in groups if group):
            groups[0].insert(0, "weights")
        *before, continuous, static = groups
        for group in before:
            self._child(self._job(shape, group), found)
        if serving:
            self._serve(shape, serving, found)
        for group in (continuous, static):
            self._child(self._job(shape, group), found)

    # --- parts in processes of their own ------------------------------------------------------------------------------
    def _child(self, job: Job, found: dict[str, Any]) -> None:
        """Run *job*; parts that a broken or killed process left undone are run in a new one."""
        left = list(job.parts)
        while left:
            if self._time_left() < LEAST_S:
                for part in left:
                    self._note(found, part, {"failed": "skipped: the time of the whole run is used up"})
                return
            done = self._once(replace(job, parts=left), found)
            left = left[done:]

    def _once(self, job: Job, found: dict[str, Any]) -> int:
        """One process; the number of parts that it finished or failed at (at least one)."""
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "results.jsonl")
            out.touch()
            words = [sys.executable, "-m", "gpu.child", replace(job, out=str(out)).to_json()]
            process = subprocess.Popen(words, cwd=Path(__file__).parent, stdin=subprocess.DEVNULL)
            try:
                return self._watch(process, job, out, found)
            finally:
                _end(process)

    def _watch(self, process: subprocess.Popen[bytes], job: Job, out: Path, found: dict[str, Any]) -> int:
        done = 0
        began = time.monotonic()
        while True:
            status = process.poll()
            lines = out.read_text(encoding="utf-8").split("\n")[:-1]
            for line in lines[done:]:
                entry = json.loads(line)
                self._note(found, entry["part"], entry["found"])
                done, began = done + 1, time.monotonic()
            if done == len(job.parts):
                return done
            if status is not None:
                if done and status == 75:
                    return done  # it gave up by itself, after a part that it has reported
                self._note(found, job.parts[done], {"failed": f"the process ended with status {status}"})
                return done + 1
            part = job.parts[done]
            if time.monotonic() - began > min(LIMITS.get(part, 120), self._time_left()):
                self._note(found, part, {"failed": f"killed after {time.monotonic() - began:.0f} s"})
                return done + 1
            time.sleep(0.1)

    # --- the server ---------------------------------------------------------------------------------------------------
    def _serve(self, shape: str, parts: Sequence[str], found: dict[str, Any]) -> None:
        """``startup``: a first start with empty caches and weights that come from the disk, and the next one. ``http``
        asks the server of the last start."""
        caches = Path(tempfile.mkdtemp(prefix="caches-", dir=self.folder))
        starts: dict[str, Any] = {}
        try:
            if "startup" in parts:
                evict(self.folder / shape)
                with self._start(shape, caches) as (_, starts["first"]):
                    pass
            with self._start(shape, caches) as (server, starts["second"]):
                if "startup" in parts:
                    self._note(found, "startup", starts)
                if "http" in parts:
                    self._note(found, "http", self._http(shape, server))
        except Exception as error:
            for part in parts:
                if part not in found:
                    self._note(found, part, {**starts, **failure(error)})
        finally:
            shutil.rmtree(caches, ignore_errors=True)

    def _start(self, shape: str, caches: Path) -> Any:
        options = deployment(sizes_of(shape), self.device, self.deployment)
        return start(shape, self.folder / shape, options, caches, min(LIMITS["startup"], max(1.0, self._time_left())))

    def _http(self, shape: str, server: ShapeServer) -> dict[str, Any]:
        try:
            return http(server, sizes_of(shape), min(120, max(1.0, self._time_left())))
        except Exception as error:
            return {**failure(error), "log": server.log()}

    # --- results ------------------------------------------------------------------------------------------------------
    def _time_left(self) -> float:
        return self.until - time.monotonic()

    def _note(self, found: dict[str, Any], part: str, facts: dict[str, Any]) -> None:
        found[part] = facts
        if part != "check":
            found["summary"] = derive({name: value for name, value in found.items() if name != "summary"})
        write(self.out, self.result)
        spent = f" ({facts['part_seconds']:.1f} s)" if "part_seconds" in facts else ""
        print(f"{part}: {facts.get('failed', 'done')}{spent}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """One that is done ends by itself; another is killed."""
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # SIGTERM ends children and server too


def _anchor_python_path() -> None:
    """Children run in other folders: what is relative in ``PYTHONPATH`` must still be found."""
    if path := os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep) if part)


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_listed((*MEASURED, "tiny")), default=list(MEASURED), help="%(default)s")
    parser.add_argument("--parts", type=_listed(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument("--no-check", action="store_true", help="leave the parity check out")
    parser.add_argument(
        "--batches", type=lambda t: [int(n) for n in t.split(",")], default=[], help="of decode, floors"
    )
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--deployment",
        type=json.loads,
        default={},
        metavar="JSON",
        help='changes to it: \'{"engine": {"threads": 2}}\'',
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints (default: a temporary one); what is there is kept")
    parser.add_argument("--minutes", type=float, default=7.7, help="what is not done by then is left out")
    parser.add_argument("--commit", help="of the code, where it is no checkout")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    until = time.monotonic() + 60 * options.minutes
    _anchor_python_path()
    signal.signal(signal.SIGTERM, _stop)
    wanted = {*options.parts, *(need for part in options.parts for need in NEEDS.get(part, ())), "check"}
    if options.no_check:
        wanted.discard("check")
    if options.device == "cpu":
        wanted.discard("timeline")  # of a GPU's kernels
    parts = [part for part in PARTS if part in wanted]
    facts = environment(packages=PACKAGES)
    if options.commit:
        facts["commit"] = options.commit
    settings = {"parts": parts, "device": options.device, "deployment": options.deployment, "batches": options.batches}
    temporary = None if options.folder else tempfile.TemporaryDirectory(prefix="decode-gpu-")
    folder = options.folder or Path(temporary.name if temporary else "")
    folder.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(
        parts, options.device, folder.resolve(), options.out, until, options.batches, options.deployment,
        keep=temporary is None,
        result={"name": "decode_gpu", "environment": facts, "settings": settings, "shapes": {}},
    )  # fmt: skip
    interrupted = False
    try:
        benchmark.run(options.shapes)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if temporary:
            temporary.cleanup()
    print_report(benchmark.result)
    if interrupted:
        print(f"Interrupted; {options.out} has what was done.", file=sys.stderr)
        return 130
    found = [benchmark.result.get("check", {}), *(p for s in benchmark.result["shapes"].values() for p in s.values())]
    return 1 if any("failed" in part for part in found) else 0


if __name__ == "__main__":
    sys.exit(main())
