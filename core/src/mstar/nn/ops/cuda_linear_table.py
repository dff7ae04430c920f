"""How the linear layers of :mod:`mstar.nn.ops.cuda_linear` are cut, by their sizes and the number of rows.

``benchmarks/gpu_linear.py --sweep`` measures a few ways and prints lines for :data:`TUNED`; sizes that are not in it
are cut by the reasoning of :func:`default`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

__all__ = ["CLASSES", "DIVIDED", "TUNED", "Cut", "Key", "candidates", "config", "default", "divided", "row_class"]

CLASSES = (1, 4, 8, 16, 32, 64)
"""Most rows of each class. A class has one cut, so a row's numbers are the same within it."""

UNMEASURED = 1
"""Most rows for sizes that were not measured: with more, cuBLAS reads the weights about as fast."""

SMS = 132  # multiprocessors of an H100 or H200
SHARED = 224 << 10  # bytes of shared memory of one, beside what it keeps for itself
_LEAST = 8192
"""Least bytes that a program reads: less does not pay for starting it."""


class Cut(NamedTuple):
    """*block_n* output features (for a gated layer: half of them gates) and *block_k* input features at a time; *split*
    programs share the input features; *stages* blocks have room in shared memory, all but one on their way. With one
    row, two are in registers. *narrow*: a program's warps share the input features, each *block_k* of them at a
    time, and no programs do."""

    block_n: int
    block_k: int
    split: int = 1
    stages: int = 2
    warps: int = 4
    narrow: bool = False


class Key(NamedTuple):
    """*n*: rows of the weight, gates and ups both. *k*: input features. *rows*: one of :data:`CLASSES`."""

    n: int
    k: int
    gated: bool
    rows: int


TUNED: dict[Key, Cut | None] = {
    # Qwen3-0.6B
    Key(4096, 1024, False, 1): Cut(2, 1024, 1, 2, 4),
    Key(4096, 1024, False, 4): Cut(32, 64, 1, 4, 4, narrow=True),
    Key(4096, 1024, False, 8): Cut(32, 64, 1, 4, 4, narrow=True),
    Key(4096, 1024, False, 16): Cut(64, 256, 2, 3, 4),
    Key(1024, 2048, False, 1): Cut(8, 1024, 1, 2, 8),
    Key(1024, 2048, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(1024, 2048, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(1024, 2048, False, 16): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(6144, 1024, True, 1): Cut(8, 1024, 1, 2, 8),
    Key(6144, 1024, True, 4): Cut(64, 256, 1, 4, 4),
    Key(6144, 1024, True, 8): Cut(64, 256, 1, 4, 4),
    Key(6144, 1024, True, 16): Cut(64, 256, 1, 4, 4),
    Key(1024, 3072, False, 1): Cut(8, 1024, 1, 2, 8),
    Key(1024, 3072, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(1024, 3072, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(1024, 3072, False, 16): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(151936, 1024, False, 1): Cut(8, 1024, 1, 2, 8),
    # Llama-3.2-3B
    Key(5120, 3072, False, 1): Cut(16, 512, 1, 2, 4),
    Key(3072, 3072, False, 1): Cut(4, 512, 1, 2, 4),
    Key(3072, 3072, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(3072, 3072, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(16384, 3072, True, 1): Cut(4, 1024, 1, 2, 4),
    Key(16384, 3072, True, 4): Cut(128, 64, 1, 6, 8),
    Key(16384, 3072, True, 8): Cut(128, 64, 1, 6, 8),
    Key(3072, 8192, False, 1): Cut(4, 512, 1, 2, 4),
    Key(3072, 8192, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(3072, 8192, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(128256, 3072, False, 1): Cut(4, 2048, 1, 2, 4),
    # Qwen3-8B, whose o and down are those of Qwen3.5-9B
    Key(6144, 4096, False, 4): Cut(64, 256, 1, 4, 4),
    Key(6144, 4096, False, 8): Cut(64, 256, 1, 4, 4),
    Key(4096, 4096, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(4096, 4096, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(4096, 12288, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(4096, 12288, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    # Qwen3.5-9B: what comes before a gated delta net, and the head
    Key(12352, 4096, False, 4): Cut(32, 64, 1, 4, 4, narrow=True),
    Key(12352, 4096, False, 8): Cut(32, 64, 1, 4, 4, narrow=True),
    Key(248320, 4096, False, 4): Cut(32, 128, 1, 3, 4, narrow=True),
    Key(248320, 4096, False, 8): Cut(32, 128, 1, 3, 4, narrow=True),
    # Qwen3.5-4B: o and down
    Key(2560, 4096, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(2560, 4096, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(2560, 9216, False, 4): Cut(16, 128, 1, 4, 4, narrow=True),
    Key(2560, 9216, False, 8): Cut(16, 128, 1, 4, 4, narrow=True),
}
"""Measured best on an H200 (``benchmarks/results/``), by 3 % or more where there are several rows; ``None``: cuBLAS is
faster. With more than one row, what is not here is cuBLAS's."""


DIVIDED: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (2560, 4096): ((64, 2),),
    (2560, 9216): ((64, 3),),
}
"""Output and input features of layers whose few output features cuBLAS would occupy a GPU with by dividing the input
features and adding parts up in a kernel of its own: most rows, and into how many parts (``benchmarks/gpu_between.py``).
What is done within one of this module's kernels, and with fewer rows, is none of these."""


def divided(n: int, k: int, rows: int) -> int | None:
    """Into how many parts a product is divided that a norm adds up; ``None``: it is not."""
    return next((parts for most, parts in DIVIDED.get((n, k), ()) if rows <= most), None)


def row_class(rows: int) -> int | None:
    """The class that *rows* are cut as, by its largest number; ``None``: there are too many."""
    return next((most for most in CLASSES if rows <= most), None)


@cache
def config(key: Key) -> Cut | None:
    """The cut for *key*, or ``None`` where the layer is better left to cuBLAS."""
    if key in TUNED:
        return TUNED[key]
    return default(key) if key.rows <= UNMEASURED else None


def default(key: Key) -> Cut:
    """Without measurement: programs for every multiprocessor, evenly, with tens of kilobytes each on their way."""
    if key.rows == 1:
        # A program's rows of the weight are read as one piece of 16 kB, which no program waits to see used.
        block_k = min(_power_below(key.k), 1024)
        block_n = max(min(_LEAST // block_k, _power_below(key.n // (4 * SMS))), 4)
        return Cut(block_n, block_k, warps=max(min(block_k // 256, 4), 1))
    block_k = 128
    tiles, steps = -(-key.n // 64), -(-key.k // block_k)
    split = min(_splits(steps), key=lambda split: _cost(tiles * split, split))
    stages = min(steps // split + 1, 4 if key.rows > 32 else 5)
    return Cut(64, block_k, split, stages)


def candidates(key: Key) -> list[Cut]:
    """Cuts worth measuring: at most twelve, for more than one row at most eight."""
    if key.rows == 1:
        sizes = ((4, 512), (8, 512), (16, 512), (2, 1024), (4, 1024), (8, 1024), (16, 256), (4, 2048))
        found = [default(key), *(Cut(n, k, warps=4) for n, k in sizes if k <= key.k)]
        found += [Cut(n, k, warps=8) for n, k in ((8, 1024), (4, 2048)) if k <= key.k]
    else:
        found = []
        many = key.n >= 128 * SMS  # programs enough without the narrowest tiles
        for block_n, block_k, stages, warps in (
            (64, 128, 5, 4), (128, 64, 6, 8), (128, 128, 4, 4), (64, 256, 4, 4), *([(64, 64, 8, 4)] if many else []),
        ):  # fmt: skip
            tiles, steps = -(-key.n // block_n), -(-key.k // block_k)
            split = min(_splits(steps), key=lambda split: abs(math.log(tiles * split / SMS)))
            found.append(Cut(block_n, block_k, split, min(steps // split + 1, stages), warps))
        for block_n, block_k, stages, warps in (
            (32, 128, 3, 4), (32, 64, 4, 4), *([] if many else [(16, 128, 4, 4), (16, 128, 3, 8)]),
        ):  # fmt: skip
            steps = -(-key.k // (block_k * warps))
            found.append(Cut(block_n, block_k, 1, min(steps + 1, stages), warps, True))
    fitting = [cut for cut in found if _shared(cut, key.rows) <= SHARED]
    return list(dict.fromkeys(fitting))[:12]


def _shared(cut: Cut, rows: int) -> int:
    """Bytes of shared memory that a program's pipeline takes."""
    if rows == 1:
        return 0
    if cut.narrow:  # and norms
        return cut.stages * (cut.block_n + max(rows, 8) + 2) * cut.block_k * cut.warps * 2
    return cut.stages * (cut.block_n + max(rows, 16)) * cut.block_k * 2


def _splits(steps: int) -> list[int]:
    return [split for split in range(1, min(steps, 16) + 1) if steps % split == 0]


def _cost(programs: int, split: int) -> float:
    """How much longer than at an even load, and what adding up the parts costs. Few programs leave memory waiting."""
    uneven = -(-programs // SMS) * SMS / programs if programs < 6 * SMS else 1.0
    return uneven + 0.02 * split + (0.15 if programs < 1.5 * SMS else 0.0)


def _power_below(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1
