"""How fast weights are loaded: ``python benchmarks/load_speed.py [--device cuda|cpu] [--gb N] [--out FILE]``.

A random checkpoint in bfloat16 (decoder layers, fused query/key/value and gate/up) is written to a temporary folder,
then loaded as bfloat16 and as float32, from the disk (the file's pages are dropped from the system's cache first) and
from the cache. Beside it stands plain reading of the same file, from front to back into one buffer, as dd does it: no
loader that reads in one piece can be faster. Every figure is from a fresh process, ways take turns, the best round
counts and all are kept. MB/s are of the file's bytes; peak memory is the process's, above what it had before loading.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import environment, table

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 1024, 4096, 8, 4, 128
LAYER_BYTES = 2 * HIDDEN * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 3 * INNER)
WAYS = ("plain", "bfloat16", "float32")
CHUNK = 1 << 20


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for n in range(layers):
        yield f"{n}.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{n}.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{n}.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{n}.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{n}.gate_proj.weight", (INNER, HIDDEN)
        yield f"{n}.up_proj.weight", (INNER, HIDDEN)
        yield f"{n}.down_proj.weight", (HIDDEN, INNER)
        yield f"{n}.norm.weight", (HIDDEN,)


def write(folder: Path, layers: int) -> Path:
    """The checkpoint, on the disk and not only in the cache."""
    import torch

    from mstar.weights.writer import write_safetensors

    generator = torch.Generator().manual_seed(1)
    layout = {name: ("BF16", shape) for name, shape in shapes(layers)}

    def data() -> Iterator[bytes]:
        for _, shape in layout.values():
            # any sixteen bits but those of infinities and NaNs: one exponent bit is off
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator) & ~(1 << 13)
            yield bits.numpy().tobytes()

    file = folder / "model.safetensors"
    write_safetensors(file, layout, data())
    with file.open("rb") as written:
        os.fsync(written.fileno())
    return file


def forget(file: Path) -> None:
    """Drop *file* from the system's cache."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(way: str, device: str, folder: Path, layers: int) -> dict[str, Any]:
    """One way, in this process."""
    file = folder / "model.safetensors"
    if way == "plain":
        buffer = bytearray(CHUNK)
        begin = time.perf_counter()
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
        return {"seconds": time.perf_counter() - begin}
    import torch

    from mstar.weights.loader import load
    from mstar.weights.names import WeightMap

    module, where = build(layers), torch.device(device)
    torch.zeros(8, 8, device=where).sum().item()
    weight_map, before = WeightMap.from_module(module), peak()
    begin = time.perf_counter()
    load(module, weight_map, folder, where, getattr(torch, way))
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    seconds = time.perf_counter() - begin
    on_host = where.type == "cpu"
    weights = sum(p.nbytes for p in module.parameters()) if on_host else 0
    return {"seconds": seconds, "peak_mb": peak() - before, "beyond_weights_mb": peak() - before - weights / 1e6}


def build(layers: int) -> Any:
    import torch
    from torch import nn

    from mstar.nn.linear import MergedLinear, QKVLinear, RowLinear
    from mstar.nn.norm import RMSNorm

    with torch.device("meta"):
        return nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv_proj": QKVLinear(HIDDEN, HEADS, KV_HEADS, HEAD_DIM),
                    "o_proj": RowLinear(HEADS * HEAD_DIM, HIDDEN),
                    "gate_up_proj": MergedLinear(HIDDEN, {"gate_proj": INNER, "up_proj": INNER}),
                    "down_proj": RowLinear(INNER, HIDDEN),
                    "norm": RMSNorm(HIDDEN),
                }
            )
            for _ in range(layers)
        )


def peak() -> float:
    """Most resident memory of this process so far, MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def in_a_process(way: str, device: str, folder: Path, layers: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", way, "--device", device, "--folder", str(folder)]
    done = subprocess.run([*words, "--layers", str(layers)], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rounds(device: str, folder: Path, layers: int, runs: int) -> Iterator[dict[str, Any]]:
    """Every way from disk and from cache: the best of *runs*, and all of them."""
    file = folder / "model.safetensors"
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(runs):
        for way in WAYS:
            for source in ("disk", "cache"):  # the first leaves the file in the cache for the second
                if source == "disk":
                    forget(file)
                found.setdefault((source, way), []).append(in_a_process(way, device, folder, layers))
    size = file.stat().st_size / 1e6
    for (source, way), figures in sorted(found.items()):
        best = min(figures, key=lambda figure: figure["seconds"])
        every = [size / figure["seconds"] for figure in figures]
        yield {"from": source, "way": way, "mb_per_s": size / best["seconds"], **best, "all_mb_per_s": every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.device, options.folder, options.layers)))
        return
    facts = environment(packages=("torch", "safetensors"))
    layers = max(1, round(options.gb * 1e9 / LAYER_BYTES))
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        size = write(Path(name), layers).stat().st_size
        results = list(rounds(options.device, Path(name), layers, options.runs))
    columns = ["from", "way", "mb_per_s", "seconds", "peak_mb", "beyond_weights_mb"]
    table(f"loading {size / 1e9:.1f} GB in bfloat16 to {options.device}", results, columns)
    if options.out is not None:
        settings = {"device": options.device, "bytes": size, "layers": layers, "runs": options.runs}
        content = {"name": "load_speed", "environment": facts, "settings": settings, "results": results}
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
