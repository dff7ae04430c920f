"""Pictures on a GPU: the engine against diffusers, against its own plain calls, and against what the device allows.

    python benchmarks/image_gpu.py --out FILE.json                                  # all shapes; no network, no weights
    python benchmarks/image_gpu.py --shapes klein-4b --parts floor,graphs,vae,diffusers --rounds 3 --at-once 1,4 \\
        --out FILE.json                                                             # under two minutes
    python benchmarks/image_gpu.py --shapes tiny --device cpu --out FILE.json       # does it work? no figures

Models have random weights at published shapes. Each part runs in a process of its own, which imports what it needs
while the one before measures, and the file is written after each: what breaks or takes longer than ``--limit`` is
reported, and the next goes on.

Parts, in the order in which they are run: ``floor``: products and attention of one step alone, and the step itself by
plain PyTorch operations, with the fused kernels, and captured, the last two compared with the first. ``graphs``
(captured steps, the default): latency of one request, pictures a second at 1, 4 and 16 at once. ``flashinfer``: the
same with ``attention_backend: flashinfer``. ``timeline``: where the time of one such request goes, step by step and gap
by gap. ``load``: the steps of so many requests at once, by their rows, and how busy the device is. ``plain`` (neither
kernels of M*'s own nor graphs): as ``graphs``; its pictures are what others' PSNR is to. ``vae``: decoding.
``diffusers``: the reference, in batches of the same sizes. ``http``: ``graphs`` behind ``mstar serve``, and how long
its files take to encode. ``eager``: the kernels without graphs. ``compiled`` (and compiled layers), ``vae-compiled``,
``diffusers-compiled``: minutes each. ``exact``: compiled with exact norms and eager rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from common import environment
from image.figures import derive, show

PARTS = (
    "floor", "graphs", "flashinfer", "timeline", "load", "plain", "vae", "diffusers", "http", "eager", "compiled",
    "vae-compiled", "diffusers-compiled", "exact",
)  # fmt: skip
PICTURES = ("graphs", "flashinfer", "plain", "eager", "compiled", "exact")
"""Parts whose pictures are compared: those of :data:`image.engine.ENGINES`."""
_OURS = ("image.steps", "mstar.worker.core", "mstar_diffusion.flux2.model", "mstar_diffusion.z_image.model")
_DIFFUSERS = (
    "image.reference",
    "transformers.models.qwen3.modeling_qwen3",
    "diffusers.pipelines.flux2.pipeline_flux2_klein",
    "diffusers.pipelines.z_image.pipeline_z_image",
)
PACKAGES = ("torch", "triton", "diffusers", "transformers", "mstar-core", "mstar-diffusion")


def main(words: Sequence[str]) -> int:
    os.environ["MSTAR_BENCH_RANDOM"] = "1"  # for this process and those that it starts
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="z-image,klein-4b,klein-9b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", default="1,4,16", help="numbers of requests at a time")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of what a median is taken of")
    parser.add_argument("--limit", type=float, default=590, help="seconds for one part")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--child", nargs=3, metavar=("SHAPE", "PART", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if strange := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(strange))}; known: {', '.join(PARTS)}")
    if args.child:
        _import_for(args.child[1])
        if not sys.stdin.readline():  # nobody waits for it any more
            return 1
        args.out.write_text(json.dumps(measure(*args.child, args)))
        return 0
    found: dict[str, Any] = {"environment": environment(PACKAGES), "settings": _settings(args), "results": {}}
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            results = found["results"][shape] = {}
            parts = sorted(args.parts.split(","), key=PARTS.index)
            children = [_start(shape, parts[0], scratch, args)]
            for number, part in enumerate(parts):
                if number + 1 < len(parts):  # it imports what it needs while this one measures
                    children.append(_start(shape, parts[number + 1], scratch, args))
                results[part] = _finish(children[number], Path(scratch) / f"{part}.json", args)
                derive(results, Path(scratch), PICTURES)
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    show(found["results"])
    return 1 if any("error" in part for shape in found["results"].values() for part in shape.values()) else 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) for name, value in vars(args).items() if name not in ("child", "out")}


def _start(shape: str, part: str, scratch: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of a part, which waits for a line before it touches the device."""
    out = Path(scratch) / f"{part}.json"
    words = [sys.executable, __file__, "--child", shape, part, scratch, "--out", str(out), "--device", args.device]
    words += ["--at-once", args.at_once, "--rounds", str(args.rounds)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _finish(child: subprocess.Popen[str], out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the part of *child* found, which it writes to *out*: it begins now."""
    began = time.monotonic()
    with child:
        try:
            _, said = child.communicate("\n", timeout=args.limit)
        except subprocess.TimeoutExpired:
            _end(child)
            _, said = child.communicate(timeout=10)  # all that held its pipe has ended
            return {"error": [f"took longer than {args.limit:.0f} s", *said.strip().splitlines()[-8:]]}
        except BaseException:
            _end(child)
            raise
    if child.returncode or not out.is_file():
        return {"error": said.strip().splitlines()[-8:], "part_s": time.monotonic() - began}
    found: dict[str, Any] = json.loads(out.read_text())
    return {**found, "part_s": time.monotonic() - began}


def _end(child: subprocess.Popen[str]) -> None:
    """End *child* and all that it started, in its session or in one of their own: they hold the device."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _import_for(part: str) -> None:
    """What takes longest to import, without touching the device."""
    for name in _DIFFUSERS if part.startswith("diffusers") else _OURS:
        importlib.import_module(name)


def measure(shape_name: str, part: str, scratch: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part, in this process."""
    from image import engine, load, nodes
    from image.shapes import SHAPES, write_shape

    shape, folder = SHAPES[shape_name], Path(scratch) / "weights"
    if not folder.exists():
        folder.mkdir()
        write_shape(shape, folder)
    at_once = [1] if part in engine.MINUTES else [int(number) for number in args.at_once.split(",")]
    if part == "plain":
        engine.without_kernels()
    if part in engine.ENGINES:
        return engine.engine(shape, folder, part, at_once, args, Path(scratch) / f"{part}.npy")
    if part == "timeline":
        return engine.timeline(shape, folder, args, Path(scratch) / "trace.json")
    if part == "load":
        return load.load(shape, folder, at_once, args, Path(scratch) / "load.json")
    if part == "http":
        from image.over_http import http

        return http(shape, folder, at_once, args)
    if part == "floor":
        return nodes.floor(shape, folder, args)
    if part.startswith("vae"):
        return nodes.vae(shape, folder, args, part == "vae-compiled")
    from image.reference import diffusers

    return diffusers(shape, folder, part, at_once, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
