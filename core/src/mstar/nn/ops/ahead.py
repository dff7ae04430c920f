"""Weights that are asked for before their turn (CUDA).

A decoding step is bound by reading weights, and while a norm or an activation runs between two products nothing is
read. So such a kernel gets a few programs more, which ask for the beginning of the next product's weights and end at
once: memory brings them into the second cache while the rows are computed and the product is started. No result depends
on it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, nn

from mstar.nn.ops.cuda_linear_table import divided

__all__ = ["ARGUMENTS", "LINE", "Ahead", "ask", "choose", "fetch", "lines_of", "nothing", "places", "plan"]

ROWS = 128
"""Most rows of a step that memory bounds."""
BYTES = 4 << 20
"""What is asked for between two products. With more a kernel waits until memory takes its questions: 8 MB were worth
less on an H200, and 12 MB nothing (``benchmarks/gpu_between.py``)."""
ARGUMENTS = ("next_weight", "next_lines", "next_of_row", "next_of_part", "next_row", "next_part")
"""What a kernel that asks calls the fields of an :class:`Ahead`. All but the first are for no variant of its own."""
LINE = 128
"""Bytes that are asked for at once, the second cache's lines."""


class Ahead(NamedTuple):
    """Which lines of *weight* are asked for: of each of its rows so many from the beginning of each of its parts."""

    weight: Tensor
    lines: int
    """In all."""
    of_row: int
    of_part: int
    row: int
    """Elements from one row to the next."""
    part: int
    """Elements from one part's beginning to the next's."""

    def programs(self, warps: int) -> int:
        """How many of so many *warps* ask for it, :func:`lines_of` each."""
        return -(-self.lines // lines_of(warps))


def lines_of(warps: int) -> int:
    """What a program asks for: two lines a thread."""
    return 64 * warps


def plan(weight: Tensor | None, rows: int) -> Ahead | None:
    """What to ask of *weight* ``[N, K]`` in front of its product with *rows* rows; ``None``: nothing."""
    if weight is None or not weight.is_cuda or type(weight) not in (Tensor, nn.Parameter) or weight.dim() != 2:
        return None
    if not 0 < rows <= ROWS or not weight.is_contiguous():
        return None
    return choose(weight, divided(weight.shape[0], weight.shape[1], rows) or 1)


def choose(weight: Tensor, parts: int) -> Ahead | None:
    """The lines of a packed *weight* that fit into :data:`BYTES`, evenly over its rows.

    :param parts: into how many its product divides K, for programs that begin side by side: evenly over them too.
    """
    n, k = weight.shape
    of_part = min(BYTES // max(n, 1), k * weight.itemsize) // (LINE * parts)
    if not n or not of_part:
        return None
    return Ahead(weight, n * of_part * parts, of_part * parts, of_part, k, k // parts)


def nothing(tensor: Tensor) -> Ahead:
    """The arguments of a kernel that asks for nothing; *tensor* stands for a weight."""
    return Ahead(tensor, 0, 1, 1, 0, 0)


@triton.jit
def places(number, lines, of_row, of_part, row, part, turn: tl.constexpr, each: tl.constexpr):
    """Where the *turn* lines of *each* elements begin that program *number* asks for. Beyond the last, that again."""
    at = tl.minimum(number * turn + tl.arange(0, turn), lines - 1)
    within = at % of_row
    return (at // of_row).to(tl.int64) * row + (within // of_part) * part + (within % of_part) * each


@triton.jit
def fetch(weight, number, lines, of_row, of_part, row, part, turn: tl.constexpr, line_bytes: tl.constexpr):
    """Ask for *turn* lines, those of program *number*. They are as :class:`Ahead` says; nobody waits for them."""
    each: tl.constexpr = line_bytes * 8 // weight.dtype.element_ty.primitive_bitwidth
    ask((weight + places(number, lines, of_row, of_part, row, part, turn, each)).to(tl.int64))


@triton.jit
def ask(address):
    """Bring the lines at these addresses (int64) into the second cache."""
    # Not cp.async.bulk.prefetch, of whose addresses a warp takes one at a time.
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)
