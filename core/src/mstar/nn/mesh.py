"""The processes that run one node together, as its layers see them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["SINGLE", "ProcessMesh"]


@dataclass(frozen=True)
class ProcessMesh:
    """A tp × sp mesh of processes, seen from one of them. All of them run the same steps of the node in the same order.

    :param tp: processes that share each layer's weights. :param sp: processes that share a sequence.
    :param rank: this process's place, from 0; those of one tensor-parallel group are neighbours:
        ``rank == sp_rank * tp + tp_rank``. Rank 0 answers for the mesh.
    :param group: ``torch.distributed`` group of all of them, in the order of their ranks; ``None`` when there is one.
    :param tp_group: of those with this process's :attr:`sp_rank`; ``None`` when *tp* is 1.
    :param sp_group: of those with this process's :attr:`tp_rank`; ``None`` when *sp* is 1.
    """

    tp: int = 1
    sp: int = 1
    rank: int = 0
    group: Any = None
    tp_group: Any = None
    sp_group: Any = None

    @property
    def size(self) -> int:
        return self.tp * self.sp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def sp_rank(self) -> int:
        return self.rank // self.tp


SINGLE = ProcessMesh()
"""One process alone."""
