"""Several GPUs as one, side by side, and what moving a context between them costs.

    python benchmarks/ranks_gpu.py --out FILE.json                        # two GPUs: everything, in about six minutes
    python benchmarks/ranks_gpu.py --parts decode --symmetric-bytes 0 --out FILE.json
    python benchmarks/ranks_gpu.py --ranks 4 --parts check,sums,decode --out FILE.json
    python benchmarks/ranks_gpu.py --ranks 1 --parts echo --shapes qwen3-8b --out FILE.json           # on one GPU
    python benchmarks/ranks_gpu.py --shapes tiny --device cpu --out FILE.json   # does it work? no figures

Models have random weights at published shapes (``gpu/shapes.py``). Parts: ``check`` (all ranks say what one says, token
for token in float32; always first), ``sums`` (one all-reduce of a step's size, by NCCL, in order, and through symmetric
memory; a row's logits gathered), ``decode`` (tp = ranks beside tp = 1), ``timeline`` (the kernels of such steps on rank
0), ``echo`` (with ``--ranks 1`` only: steps of one rank of two, whose peer is always in time), ``replicas`` (a replica
on each GPU beside one), ``transfer`` (a context's pages from one GPU to another), ``values`` (a value there and back as
workers send it, by each way; half a minute), ``split`` (prompts and decoding apart, served, by each way that states
move, beside one rank; of itself in a minute and a half with ``--parts split --shapes llama-3.2-3b``). Each part runs in
processes of its own; what breaks is reported, and the next goes on. NOTES.md says what is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, environment, table

__all__ = ["main", "run_part"]

PARTS = ("check", "sums", "decode", "timeline", "echo", "replicas", "transfer", "values", "split")
SHAPES = ("llama-3.2-3b", "qwen3-8b")
LIMIT_S = 240.0
ALL_S = 480.0
"""Seconds for one part, and for all together: what has not begun by then is left out."""
PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "mstar-core")


def run_part(
    part: str,
    shapes: tuple[str, ...],
    device: str,
    ranks: int,
    folder: Path,
    symmetric_bytes: int = 0,
    early: bool = False,
    limit: float = LIMIT_S,
) -> dict[str, Any]:
    """The result of *part* in *ranks* processes, or ``{"failed": why}``."""
    with tempfile.TemporaryDirectory(prefix="mstar-ranks-") as place:
        out = Path(place, "results")
        out.touch()
        path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        processes = []
        for rank in range(ranks):
            job = {
                "shapes": shapes,
                "parts": (part,),
                "device": device,
                "rank": rank,
                "size": ranks,
                "meeting": str(Path(place, "meeting")),
                "folder": str(folder),
                "out": str(out),
                "symmetric_bytes": symmetric_bytes,
                "early": early,
            }
            if part == "split" and rank:
                break  # its executor starts the others
            module = "gpu.split" if part == "split" else "gpu.ranks"
            command = [sys.executable, "-m", module, json.dumps(job)]
            processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}))
        failed = _wait(processes, time.monotonic() + limit)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    for line in lines:
        if "failed" in line["result"] or line["rank"] != 0:
            return {"failed": line["result"].get("failed", line["result"]), "rank": line["rank"]}
    return lines[0]["result"] if lines else {"failed": failed or "rank 0 said nothing"}


def _wait(processes: list[subprocess.Popen[bytes]], until: float) -> str | None:
    """Until all have ended, or one has failed: then the others are ended, which wait for it."""
    failed = None
    while failed is None and any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            failed = "it took too long"
        for rank, process in enumerate(processes):
            if process.poll():
                failed = f"rank {rank} ended with status {process.returncode}"
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return failed


def _show(part: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{part}: failed: {result['failed']}")
    elif "rows" in result:
        for name, rows in ((part, result["rows"]), ("logits", result.get("logits"))):
            if rows:
                table(name, rows, list(rows[0]), 3)
    else:
        for shape, found in result.items():
            rows = found.get("rows") or [found]
            title = f"{part}: {shape}" + (f", sums by {found['sums']}" if "sums" in found else "")
            table(title, rows, [name for name in rows[0] if name != "top"], 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--parts", help="default: all; on the CPU all that need no GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--symmetric-bytes", type=int, default=1_048_576, help="default: an engine's; 0: NCCL")
    parser.add_argument("--early", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--folder", type=Path, help="for checkpoints; default: a temporary one")
    args = parser.parse_args()
    usual = [part for part in PARTS if part != "echo" and (args.device == "cuda" or part != "timeline")]
    asked = usual if args.parts is None else args.parts.split(",")
    if args.ranks < 2 and asked != ["echo"]:
        parser.error("--ranks: at least 2, a GPU each; 1 for --parts echo")
    if strange := set(asked) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(strange))}; there are {', '.join(PARTS)}")
    shapes = tuple(args.shapes.split(","))
    content: dict[str, Any] = {"environment": environment(PACKAGES), "ranks": args.ranks, "results": {}}
    content |= {"symmetric_bytes": args.symmetric_bytes, "early": args.early}
    until = time.monotonic() + ALL_S
    with tempfile.TemporaryDirectory(prefix="mstar-checkpoints-") as temporary:
        folder = args.folder or Path(temporary)
        for part in [part for part in PARTS if part in asked or (part == "check" and args.ranks > 1)]:
            left = until - time.monotonic()
            if left <= 0:
                result = {"failed": f"nothing is begun after {ALL_S:.0f} s"}
            else:
                limit, sent = min(LIMIT_S, left), args.symmetric_bytes
                result = run_part(part, shapes, args.device, args.ranks, folder, sent, args.early, limit)
            content["results"][part] = result
            args.out.write_text(json.dumps(content, indent=2) + "\n")
            _show(part, result)
            if part == "check" and "failed" in result:
                return 1
    return int(any("failed" in result for result in content["results"].values()))


if __name__ == "__main__":
    sys.exit(main())
