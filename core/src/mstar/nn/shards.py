"""What of a layer a rank has under tensor parallelism: which part of a published tensor, and whether it can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mstar.nn.mesh import Group

__all__ = ["Cut", "Division", "Part", "Share", "layout_faults", "share", "shares"]


class Share(NamedTuple):
    """Items *first* … ``first + length - 1``."""

    first: int
    length: int


class Cut(NamedTuple):
    """The part of a published tensor that a rank has: along *dim*, of *size* items, those of *runs*, in their order."""

    dim: int
    size: int
    runs: tuple[Share, ...]

    @property
    def length(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def whole(self) -> bool:
        return self.length == self.size and len(self.runs) == 1

    def of(self, whole: Tensor) -> Tensor:
        """This part of the published tensor *whole*."""
        return torch.cat([whole.narrow(self.dim, *run) for run in self.runs], self.dim)

    def unshape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Of the published tensor whose part is *part*."""
        return (*part[: self.dim], self.size, *part[self.dim + 1 :])


class Part(NamedTuple):
    """Published tensor of module *module* (a sibling's name; ``""``: the layer's own) fills *rows* rows of a parameter
    from *start* on; ``rows=None``: it is the whole parameter, 0: only other ranks have it. *module* ``None``: these
    rows are 0, and published by nobody. *cut*: the part of it that this rank has; ``None``: all."""

    module: str | None
    start: int = 0
    rows: int | None = None
    cut: Cut | None = None


class Division(NamedTuple):
    """*size* of *what* that the ranks share. *copied*: ranks may also share one between them, each with a copy."""

    what: str
    size: int
    copied: bool = False

    def allows(self, ranks: int) -> bool:
        return self.size % ranks == 0 or (self.copied and ranks % self.size == 0)


def share(size: int, group: Group) -> Share:
    """This rank's of *size* items; where there are fewer items than ranks, several ranks have the same one. What does
    not divide is rounded up here, and refused by :func:`layout_faults` before anything is computed."""
    if group.size > size > 0:
        return Share(group.rank * size // group.size, 1)
    each = -(-size // group.size)
    return Share(group.rank * each, each)


def shares(sizes: tuple[int, ...], group: Group, unit: int = 1) -> tuple[Share, ...]:
    """This rank's of each of several sections one after the other, in multiples of *unit*; as items of the whole."""
    found, start = [], 0
    for size in sizes:
        own = share(size // unit, group)
        found.append(Share(start + own.first * unit, own.length * unit))
        start += size
    return tuple(found)


def layout_faults(name: str, node: nn.Module, tp: int) -> Iterator[str]:
    """Why *node*, called *name* and built for *tp* ranks, cannot be divided among them; with the layers' published
    names and the numbers of ranks that would do for all of them."""
    divisions = [
        (path, division)
        for path, module in node.named_modules()
        for division in getattr(module, "divisions", ())
        if isinstance(division, Division)
    ]
    refused = [(path, division) for path, division in divisions if not division.allows(tp)]
    if not refused:
        return
    most = max(division.size for _, division in divisions)
    fitting = [str(ranks) for ranks in range(1, min(most, 64) + 1) if all(d.allows(ranks) for _, d in divisions)]
    would = f"tp: {' or '.join(fitting)} would do for node {name!r}"
    told: dict[Division, str] = {}
    for path, division in refused:  # layers of one kind have one fault
        told.setdefault(division, path)
    for division, path in told.items():
        yield f"node {name!r}: {path}: {division.size} {division.what} are not divided by tp={tp}; {would}"
