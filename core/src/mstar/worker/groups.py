"""How the processes of a mesh find each other.

On one machine they meet over a file in a folder that their executor made: no port is opened for it. On several, one of
them keeps the store. A process is in one mesh at most, and its processes are the world of ``torch.distributed``.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mstar.nn.mesh import Mesh
from mstar.spec.deployment import EngineOptions
from mstar.spec.errors import SetupError
from mstar.spec.placement import Layout
from mstar.worker.accord import Accord
from mstar.worker.layout import open_world

__all__ = ["join_meshes"]

_PATIENCE = datetime.timedelta(minutes=10)
"""For the others to come, and for one exchange. A step that hangs longer ends by its executor's limit anyway."""


def join_meshes(
    layout: Layout, rank: int, device: torch.device, engine: EngineOptions, meeting: str | None
) -> tuple[dict[str, Mesh], Accord | None]:
    """Wait for the other processes of *rank*'s mesh; the mesh of each node that *rank* runs with others, and how they
    agree on what fails.

    :param meeting: a folder that all of them see, or ``tcp://HOST:PORT`` of a store. It is used for this start only and
        stays while they live: NCCL looks there whenever it connects two of them.
    :raises SetupError: the others did not come.
    """
    ranks = layout.gang(rank)
    if len(ranks) == 1:
        return {}, None
    shared = {node: seat for node in layout.seats if (seat := layout.seat_of(node, rank)) and len(seat.ranks) > 1}
    if meeting is None:
        raise SetupError(f"{', '.join(shared)}: several processes are to run it, and there is one; use 'processes'")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store = _store(meeting, ranks)
        dist.init_process_group(backend, store=store, rank=ranks.index(rank), world_size=len(ranks), timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"rank {rank} did not find the others of its mesh {list(ranks)}: {error}") from error
    world = open_world(device, engine)
    made = {node: world.mesh(range(len(ranks)), seat.tp, seat.sp) for node, seat in shared.items()}
    meshes = {node: mesh for node, mesh in made.items() if mesh is not None}
    if device.type == "cuda":
        _open_links(meshes, device)
    return meshes, Accord(meshes, store, ranks.index(rank), len(ranks))


def _store(meeting: str, ranks: Sequence[int]) -> Any:
    """Where *ranks* tell each other how they are reached."""
    if meeting.startswith("tcp://"):
        host, _, port = meeting.removeprefix("tcp://").rpartition(":")
        return dist.TCPStore(host.strip("[]"), int(port), timeout=_PATIENCE)  # type: ignore[attr-defined]
    # all are on this machine, whose own name, which gloo would ask for, may lead nowhere
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return dist.FileStore(str(Path(meeting, "mesh-" + "-".join(map(str, ranks)))), len(ranks))  # type: ignore[attr-defined]


def _open_links(meshes: Mapping[str, Mesh], device: torch.device) -> None:
    """Have NCCL connect each group now, which it does at the first exchange: its buffers are to be there before pools
    take what memory is left, and a fault is one of the start.

    :raises SetupError: the GPUs do not reach each other.
    """
    groups = dict.fromkeys(group for mesh in meshes.values() for group in (mesh.tp, mesh.sp) if group.size > 1)
    try:
        for group in groups:  # all ranks have them in one order
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise SetupError(f"the GPUs of a mesh cannot exchange anything: {error}") from error
