"""Memory over many edits of random sizes: ``python benchmarks/edit_memory.py [--edits N] [--clients N]``.

The server is `mstar serve` with a miniature; clients send pictures of random sizes, one to four at once, some with a
mask, in random formats, and ask for answers of random sizes and formats. Counted is the memory that the server, its
worker and its decoders have for themselves (USS: pages that nobody shares). The first half of the edits warms up
allocators and caches; of the other the median of the last quarter may be no more than 5 % or 16 MB above that of the
first.
Ends with status 1 if it is, or if an edit was not answered. The figures go to ``benchmarks/results/edit_memory.json``,
unless ``--quick`` is given.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from chat_servers import RunningServer, miniature
from common import environment, table, write_result
from PIL import Image

MODEL = "mini_denoise"
MIB = 1 << 20
WARM_UP = 0.5
SLACK_SHARE, SLACK_BYTES = 0.05, 16 * MIB
EVERY = 20


def picture(rng: random.Random, size: tuple[int, int], alpha: bool = False) -> bytes:
    """A file of random pixels; with *alpha* a PNG that is transparent in places."""
    noise = np.frombuffer(rng.randbytes(size[0] * size[1] * (4 if alpha else 3)), np.uint8)
    out = io.BytesIO()
    pixels = noise.reshape(size[1], size[0], -1)
    Image.fromarray(pixels).save(out, "PNG" if alpha else rng.choice(["PNG", "JPEG", "WEBP"]))
    return out.getvalue()


def side(rng: random.Random, most: int) -> int:
    return 2 * rng.randint(1, most // 2)


def edit(client: httpx.Client, number: int, most: int) -> str:
    """One edit, the same for the same *number*, of sides of up to *most*. Returns what is wrong, or ``""``."""
    rng = random.Random(number)
    data = {"model": MODEL, "prompt": "edit " + "x" * rng.randint(1, 20), "steps": str(rng.randint(1, 4))}
    data |= {"seed": str(rng.randrange(1000)), "output_format": rng.choice(["png", "webp", "jpeg"])}
    if rng.random() < 0.2:
        size = side(rng, 250), side(rng, 250)
        files = [("image", picture(rng, size)), ("mask", picture(rng, size, alpha=True))]
    else:
        sizes = [(rng.randint(1, most), rng.randint(1, most)) for _ in range(rng.randint(1, 4))]
        files = [("image[]", picture(rng, size)) for size in sizes]
        data["size"] = f"{side(rng, 250)}x{side(rng, 250)}"
    parts = [(name, (f"{i}.bin", content)) for i, (name, content) in enumerate(files)]
    reply = client.post("/v1/images/edits", data=data, files=parts)
    return "" if reply.status_code == 200 else f"edit {number}: {reply.status_code}: {reply.text[:200]}"


def memory(process: psutil.Process) -> int:
    """Bytes that *process* and its children have for themselves."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().uss
        except psutil.NoSuchProcess:  # a decoder that has just ended
            continue
    return total


def measure(
    url: str, process: psutil.Process, edits: int, clients: int, most: int
) -> tuple[list[int], list[str], float]:
    """The memory after each :data:`EVERY` edits, what was wrong, and edits a second."""
    samples, wrong, done, lock = list[int](), list[str](), 0, threading.Lock()

    def one(number: int) -> None:
        nonlocal done
        fault = edit(client, number, most)
        with lock:
            done += 1
            wrong.extend([fault] if fault else [])
            if done % EVERY == 0:
                samples.append(memory(process))

    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(edits)))
    return samples, wrong, edits / (time.monotonic() - began)


def judge(samples: list[int]) -> dict[str, Any]:
    """Medians of the first and the last quarter after the warm-up, in MB, and whether the memory is flat."""
    warm = samples[round(len(samples) * WARM_UP) :]
    quarter = max(1, len(warm) // 4)
    first, last = statistics.median(warm[:quarter]), statistics.median(warm[-quarter:])
    return {
        "first_mb": first / 1e6,
        "last_mb": last / 1e6,
        "most_mb": max(samples) / 1e6,
        "flat": last - first <= max(SLACK_SHARE * first, SLACK_BYTES),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--side", type=int, default=1024, help="the longest side of the pictures that are sent")
    parser.add_argument("--quick", action="store_true", help="200 edits, and nothing is written")
    options = parser.parse_args(arguments)
    edits = 200 if options.quick else options.edits
    with RunningServer(miniature(MODEL), Path()) as server:
        server.wait_ready(120)
        samples, wrong, rate = measure(server.url, psutil.Process(server.pid), edits, options.clients, options.side)
    row = {"edits": edits, "edits_per_s": rate, **judge(samples), "wrong": len(wrong)}
    table("edits of random sizes", [row], list(row))
    print(*wrong[:5], sep="\n")
    if not options.quick:
        settings = {"edits": edits, "clients": options.clients, "side": options.side, "model": MODEL}
        write_result("edit_memory", {**row, "uss_mb": [round(s / 1e6, 1) for s in samples]}, settings, environment())
    return 0 if row["flat"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
