"""How the processes of a mesh find each other, and the groups in which their layers talk.

They meet over a file in a folder that their executor made: no port is opened for it and no environment variable read.
A process is in one mesh at most, and that mesh is the default group of ``torch.distributed``.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from mstar.nn.mesh import Mesh
from mstar.spec.deployment import EngineOptions
from mstar.spec.errors import SetupError
from mstar.spec.placement import Layout
from mstar.worker.layout import open_world

__all__ = ["join_meshes"]

_PATIENCE = datetime.timedelta(minutes=10)
"""For the others to come, and for one exchange. A step that hangs longer ends by its executor's limit anyway."""


def join_meshes(
    layout: Layout, rank: int, device: torch.device, engine: EngineOptions, meeting: str | None
) -> dict[str, Mesh]:
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
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, store=store, rank=ranks.index(rank), world_size=len(ranks), timeout=_PATIENCE)
        world, made = open_world(device, engine), {}
        for tp, sp in sorted({(seat.tp, seat.sp) for seat in shared.values()}):  # one order in all processes
            made[tp, sp] = world.mesh(range(len(ranks)), tp, sp)
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"rank {rank} did not find the others of its mesh {list(ranks)}: {error}") from error
    meshes = {node: made[seat.tp, seat.sp] for node, seat in shared.items()}
    return {node: mesh for node, mesh in meshes.items() if mesh is not None}
