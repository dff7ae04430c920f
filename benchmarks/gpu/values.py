"""A value from rank 0 to rank 1 and back, as the worker packs, announces and reads it: the part ``values`` of
``ranks_gpu.py``.

By each way that there is: in the message (small ones within it, large ones through the host's shared memory, on a GPU
by way of pinned memory), and by a lane (NCCL between GPUs, gloo between CPUs). Half of the time there and back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import zmq
from torch import Tensor

from mstar.cluster.links import RankLink
from mstar.cluster.transport import LinkEnd
from mstar.worker import tensor_channel
from mstar.worker.handles import pack, unpack
from mstar.worker.lanes import lane_store
from mstar.worker.messages import Contents, Landed, Run
from mstar.worker.tensor_channel import TensorChannel, arrived

__all__ = ["SIZES", "measure"]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
REPEATS = 12
PATIENCE_S = 60.0


class _End:
    """One rank's end of both ways. *place*: a folder that both see."""

    def __init__(self, rank: int, device: torch.device, place: Path):
        self.rank, self.device = rank, device
        self.channel = TensorChannel(rank, device)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if rank:
            self.link, _ = RankLink.at(context, str(place))
        else:
            self.link = RankLink.to(context, LinkEnd(address=f"ipc://{place / 'link'}", folder=str(place)))
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.channel.begin(backend, lambda: lane_store(str(place), first=bool(rank))[0], local=True)
        while (fault := self.channel.opened()) is None:
            time.sleep(0.001)
        self.ways = ("shm", backend) if not fault else ("shm",)
        self.fault = fault
        self.channel.use()

    def send(self, tensor: Tensor, way: str) -> None:
        contents = pack(1, tensor) if way == "shm" else self.channel.pack(1, tensor)
        assert (contents.number is None) == (way == "shm")
        message = self._message(contents)
        self.link.send(self.channel.launch([message]))

    def _message(self, contents: Contents) -> Run | Landed:
        if self.rank:
            return Landed(rank=1, step=1, seconds=0.0, bases=[contents])
        return Run(step=1, rows=[], values=[contents])

    def receive(self) -> Tensor:
        """What the other end has sent, on this one's device, for what runs there next."""
        until, found = time.monotonic() + PATIENCE_S, []
        while not found:
            found = self.link.take()
            if time.monotonic() > until:
                raise RuntimeError("the other rank has sent nothing")
        message = self.channel.resolve(found[0])
        while not arrived(message):
            self.channel.step()
        self.channel.step()
        contents = message.bases[0] if self.rank == 0 else message.values[0]
        return unpack(contents, self.device)


def measure(
    rank: int, device: torch.device, place: Path, sizes: Sequence[int] = SIZES
) -> tuple[list[dict[str, Any]], TensorChannel]:
    """A row for each size, by each way; on rank 1 an empty list. And what is to be closed once both ranks are done.

    :raises RuntimeError: what came back is not what was sent.
    """
    tensor_channel.LARGE_BYTES = 1
    end = _End(rank, device, place)
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"bytes": size}
        tensor = torch.arange(size // 4, dtype=torch.float32, device=device).view(-1, 16)
        for way in end.ways:
            seconds = []
            for repeat in range(REPEATS + 2):
                began = time.perf_counter()
                if rank == 0:
                    end.send(tensor, way)
                    back = end.receive()
                else:
                    back = end.receive()
                    end.send(back, way)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                seconds.append((time.perf_counter() - began) / 2)
                if repeat == 0 and not torch.equal(back, tensor):
                    raise RuntimeError(f"{size} bytes by {way} came back changed")
            took = statistics.median(seconds[2:])
            row[f"{way}_us"], row[f"{way}_gb_s"] = took * 1e6, size / took / 1e9
        rows.append(row)
    if end.fault:
        raise RuntimeError(f"there are no lanes: {end.fault}")
    return rows if rank == 0 else [], end.channel
