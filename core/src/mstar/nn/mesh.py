"""The ranks that compute one node together, and what they tell each other.

A node's mesh has two axes. Tensor parallelism (*tp*) divides weights and heads: each rank has a share of every large
matrix and computes a part of every sum. Sequence parallelism (*sp*) divides a step's tokens: each rank has all of the
weights of its tp share. The *i*-th lowest of a node's ranks has place ``i % tp`` on the one axis and ``i // tp`` on the
other.

Layers take their share when they are built: within :func:`building` they find the node's mesh as tensors find
``torch.device``, or they are given a group. One rank is the default, has no process group, and costs a comparison.

*Order.* All ranks of a group run the same operations in the same order, so that the calls meet. With ``ordered`` sums
are taken in the order of the ranks, whatever the size of a message: a row's bits do not depend on its step's other rows
(promise P6), and all ranks have the same ones. That is how the CPU and deterministic engines add; else NCCL chooses. A
reducer adds in that order too, so that both may use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mstar.nn.eager import never_compiled
from mstar.spec.errors import SetupError

__all__ = ["SINGLE", "Group", "Mesh", "Reducer", "World", "building", "current_mesh"]

log = logging.getLogger(__name__)


class Reducer(Protocol):
    """A way for small messages (:class:`mstar.nn.symmetric.SymmetricReducer`), which adds in the order of the ranks."""

    def takes(self, x: Tensor) -> bool: ...

    def reduce(self, x: Tensor) -> Tensor: ...

    def add(self, residual: Tensor, x: Tensor) -> None: ...

    def gather(self, x: Tensor) -> Tensor: ...


class Group:
    """One axis of a mesh, of which this process is number *rank* of *size*.

    :param handle: torch's process group. Without one a group of several can be built with, but cannot talk.
    :param ordered: sums in the order of the ranks. :param reducer: for messages that it takes.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, handle: Any = None, ordered: bool = True, reducer: Reducer | None = None
    ):
        self.rank, self.size, self.handle = rank, size, handle
        self.ordered, self.reducer = ordered, reducer

    @never_compiled
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' *x*, which may be overwritten: any shape and float dtype, the same on every rank."""
        if self.size == 1 or not x.numel():
            return x
        x = x.contiguous()
        if self.reducer is not None and self.reducer.takes(x):
            return self.reducer.reduce(x)
        if self.ordered:
            return _added(self._gathered(x), x)
        torch.distributed.all_reduce(x, group=self._talking())
        return x

    @never_compiled
    def add_reduced(self, residual: Tensor, x: Tensor) -> bool:
        """Add the sum of all ranks' *x* to *residual* in place, if one kernel does both here.

        Ordered groups never do: the sum of a long message is rounded before it is added.

        :returns: whether it did; otherwise nothing was done.
        """
        if self.ordered or self.reducer is None or not self.reducer.takes(x):
            return False
        if residual.shape != x.shape or residual.dtype is not x.dtype or not residual.is_contiguous():
            return False
        self.reducer.add(residual, x.contiguous())
        return True

    @never_compiled
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' *x*, the same shape on every rank, one after the other along *dim*."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self.reducer is not None and dim in (-1, x.dim() - 1) and self.reducer.takes(x):
            return self.reducer.gather(x)
        parts = self._gathered(x)
        return torch.cat(parts.unbind(0), dim)

    @never_compiled
    def exchange(self, x: Tensor) -> Tensor:
        """Give item *i* of *x* ``[size, …]`` to rank *i*.

        :returns: ``[size, …]``: what the ranks gave this one, in their order.
        """
        if self.size == 1:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        torch.distributed.all_to_all_single(_bytes(out), _bytes(x), group=self._talking())
        return out

    def least(self, value: int) -> int:
        """The smallest *value* of all ranks, told over the CPU's backend: a model on GPUs has both."""
        if self.size == 1:
            return value
        told = torch.tensor([value], dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN, group=self._talking())
        return int(told)

    def _gathered(self, x: Tensor) -> Tensor:
        """``[size, …]``: *x* of all ranks."""
        parts = x.new_empty(self.size, *x.shape)
        # torch 2.13 has given it another name
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        gather(_bytes(parts), _bytes(x), group=self._talking())
        return parts

    def _talking(self) -> Any:
        if self.handle is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no process group: it was only built to look at")
        return self.handle


def _bytes(x: Tensor) -> Tensor:
    """*x* as one line of bytes: backends differ in the dtypes they know, and moving needs none."""
    return x.view(-1).view(torch.uint8)


def _added(parts: Tensor, out: Tensor) -> Tensor:
    """The sum of *parts* ``[ranks, …]`` in their order, in *out*; of narrow dtypes with one rounding."""
    wide = out if out.dtype in (torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    wide.copy_(parts[0])
    for part in parts[1:]:
        wide.add_(part)
    return out if wide is out else out.copy_(wide)


@dataclass(frozen=True)
class Mesh:
    """The ranks of one node, from where this process stands."""

    tp: Group
    sp: Group

    @classmethod
    def sketch(cls, tp: int = 1, sp: int = 1, rank: int = 0) -> Mesh:
        """One without processes, to build nodes with and to look at: their sizes, their weights, their faults."""
        return cls(Group(rank % tp, tp), Group(rank // tp, sp))

    @property
    def size(self) -> int:
        return self.tp.size * self.sp.size

    @property
    def rank(self) -> int:
        """This process's place among the node's ranks."""
        return self.sp.rank * self.tp.size + self.tp.rank

    def least(self, value: int) -> int:
        """The smallest *value* of all ranks."""
        return self.sp.least(self.tp.least(value))


SINGLE = Mesh(Group(), Group())

_MESH: ContextVar[Mesh] = ContextVar("mesh", default=SINGLE)


def current_mesh() -> Mesh:
    """The mesh that layers are built for here."""
    return _MESH.get()


@contextmanager
def building(mesh: Mesh) -> Iterator[None]:
    """Within it layers are built for *mesh*."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


class World:
    """The processes of one model, which ``torch.distributed.init_process_group`` has joined: with backend ``gloo`` on
    the CPU, ``cpu:gloo,cuda:nccl`` on GPUs. Meshes over the same ranks share their process groups.

    :param ordered: see :class:`Group`. :param symmetric_bytes: messages of up to so many bytes go through symmetric
        memory (:mod:`mstar.nn.symmetric`); 0: none do.
    """

    def __init__(self, device: torch.device, ordered: bool = True, symmetric_bytes: int = 0):
        if not torch.distributed.is_initialized():
            raise RuntimeError("torch.distributed has not been initialised in this process")
        self.rank: int = torch.distributed.get_rank()
        self.device = device
        self.ordered = ordered
        self.symmetric_bytes = symmetric_bytes
        self._groups: dict[tuple[int, ...], Group | None] = {}

    def mesh(self, ranks: Sequence[int], tp: int = 1, sp: int = 1) -> Mesh | None:
        """The mesh of a node on *ranks*, in any order; ``None`` on a rank that is none of them. All ranks of the world
        call it, for all nodes in one order: torch counts groups to name them.

        :raises SetupError: *ranks* are not ``tp × sp``.
        """
        if len(ranks) != tp * sp or len(set(ranks)) != len(ranks):
            raise SetupError(f"ranks {list(ranks)} are no mesh of tp={tp} × sp={sp}: it takes {tp * sp} different ones")
        ranks = sorted(ranks)
        rows = [self._group(ranks[start : start + tp]) for start in range(0, len(ranks), tp)]
        columns = [self._group(ranks[start::tp]) for start in range(tp)]
        if self.rank not in ranks:
            return None
        place = ranks.index(self.rank)
        row, column = rows[place // tp], columns[place % tp]
        assert row is not None
        assert column is not None
        return Mesh(row, column)

    def _group(self, members: Sequence[int]) -> Group | None:
        """``None`` for those of others."""
        key = tuple(members)
        if len(key) == 1:
            return SINGLE.tp
        if key not in self._groups:
            handle = torch.distributed.new_group(list(key))
            own = self.rank in key
            self._groups[key] = (
                Group(key.index(self.rank), len(key), handle, self.ordered, self._reducer(handle)) if own else None
            )
        return self._groups[key]

    def _reducer(self, handle: Any) -> Reducer | None:
        """Through symmetric memory, if every rank of *handle* has it and it gives what it should: ranks that add up in
        different ways would wait for each other for ever.

        :raises SetupError: what a rank sends does not come to another.
        """
        if not self.symmetric_bytes or self.device.type == "cpu":
            return None
        from mstar.nn.symmetric import open_reducer

        least = Group(handle.rank(), handle.size(), handle).least
        reducer: Reducer | None
        reducer, fault = open_reducer(handle, self.device, self.symmetric_bytes, least)
        if reducer is None:
            log.warning("sums go through NCCL, since symmetric memory cannot be used: %s", fault)
        return reducer

    def close(self) -> None:
        """Give the process groups back. Nothing may be computed in their meshes afterwards."""
        for group in self._groups.values():
            if group is not None:
                torch.distributed.destroy_process_group(group.handle)
        self._groups.clear()
