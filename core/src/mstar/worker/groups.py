"""How the processes of a mesh find each other, and the groups in which their layers talk.

They meet over a file in a folder that their executor made: no port is opened for it and no environment variable read.
A process is in one mesh at most, and that mesh is the default group of ``torch.distributed``.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from mstar.nn.mesh import ProcessMesh
from mstar.spec.errors import SetupError
from mstar.spec.placement import Layout, Seat

__all__ = ["join_meshes"]

_PATIENCE = datetime.timedelta(minutes=10)
"""For the others to come, and for one exchange. A step that hangs longer ends by its executor's limit anyway."""


def join_meshes(layout: Layout, rank: int, device: torch.device, meeting: str | None) -> dict[str, ProcessMesh]:
    """Wait for the other processes of *rank*'s mesh; the mesh of each node that *rank* runs with others.

    :param meeting: a folder that all of them see, used for this start only.
    :raises SetupError: the others did not come.
    """
    seats = {node: seat for node in layout.nodes_of(rank) if (seat := layout.seat_of(node, rank)) is not None}
    shared = {node: seat for node, seat in seats.items() if len(seat.ranks) > 1}
    if not shared:
        return {}
    if meeting is None:
        raise SetupError(f"{', '.join(shared)}: several processes are to run it, and there is one; use 'processes'")
    ranks = next(iter(shared.values())).ranks
    meet = Path(meeting, "mesh-" + "-".join(map(str, ranks)))
    store = dist.FileStore(str(meet), len(ranks))  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, store=store, rank=ranks.index(rank), world_size=len(ranks), timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"rank {rank} did not find the others of its mesh {list(ranks)}: {error}") from error
    made: dict[tuple[int, int], ProcessMesh] = {}
    for seat in sorted(set(shared.values()), key=lambda seat: (seat.tp, seat.sp)):  # one order in all processes
        made[seat.tp, seat.sp] = _mesh(seat, ranks.index(rank))
    return {node: made[seat.tp, seat.sp] for node, seat in shared.items()}


def _mesh(seat: Seat, rank: int) -> ProcessMesh:
    """The mesh of *seat* as its process *rank* sees it. All of its processes make all groups, in the same order."""
    tp, sp = seat.tp, seat.sp
    rows = [dist.new_group([row * tp + i for i in range(tp)]) for row in range(sp)] if tp > 1 else []
    columns = [dist.new_group([row * tp + i for row in range(sp)]) for i in range(tp)] if sp > 1 else []
    return ProcessMesh(
        tp,
        sp,
        rank,
        dist.group.WORLD,
        rows[rank // tp] if rows else None,
        columns[rank % tp] if columns else None,
    )
