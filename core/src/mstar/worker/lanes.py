"""Tensors from one rank to another by ``torch.distributed``, one way.

A *lane* is a process group of two ranks that is used in one direction only: what both ends send on one communicator at
the same moment would wait for each other. Two ranks have two lanes, apart from the groups of meshes, so no transfer
waits behind a mesh's sum, and a rank that dies takes its own lanes with it and nobody else's.

Sends and receives of a lane meet in their order. Neither waits: a transfer is asked whether it is over.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from mstar.resources.staging import record

__all__ = ["Lane", "Transfer", "lane_store", "open_lane"]

log = logging.getLogger(__name__)

_PATIENCE = datetime.timedelta(minutes=1)
"""For the other rank to come to the meeting, and for one transfer: both are told to begin at the same time."""
_NCCL_CTAS = 8
"""Blocks of a GPU that one transfer may occupy beside the steps that run meanwhile: some 150 GB/s over NVLink."""


class Transfer(Protocol):
    """One tensor on its way. *fault*: why it will not come."""

    fault: str | None

    def over(self) -> bool:
        """Whether it has been sent, or is there; or has failed."""

    def usable(self) -> bool:
        """Whether the device may be told to read it: what it runs next waits for it."""

    def hand_over(self, data: Tensor) -> Tensor:
        """*data*, which it was to receive, for what this thread's device runs next."""


class Lane(Protocol):
    """One end: either sends or receives. *data* is one line of bytes, uint8 ``[n]``, n > 0, on the lane's device."""

    def empty(self, size: int) -> Tensor:
        """Room to receive *size* bytes in."""

    def send(self, data: Tensor, number: int) -> Transfer:
        """Send *data*, the lane's *number*-th, once the device has computed it. It may not change until then."""

    def receive(self, data: Tensor, number: int) -> Transfer:
        """Fill *data* with the lane's *number*-th."""

    def close(self) -> None:
        """Give up what is under way: the other rank is gone."""


class _Waited:
    """A transfer that a thread waits for."""

    def __init__(self, work: Any):
        self.work = work
        self.fault: str | None = None
        self._over = threading.Event()

    def wait(self) -> None:
        try:
            self.work.wait(_PATIENCE)
        except RuntimeError as error:
            self.fault = str(error).splitlines()[0]
        self.work = None
        self._over.set()

    def over(self) -> bool:
        return self._over.is_set()

    def usable(self) -> bool:
        return self._over.is_set() and self.fault is None

    def hand_over(self, data: Tensor) -> Tensor:
        return data


class _GlooLane:
    """Between CPUs. Gloo's transfers can only be waited for: a thread does, one after the other."""

    def __init__(self, group: Any, peer: int):
        self._group, self._peer = group, peer
        self._under_way: queue.SimpleQueue[_Waited | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="tensor lane", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while (transfer := self._under_way.get()) is not None:
            transfer.wait()

    def empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, data: Tensor, number: int) -> Transfer:
        return self._begun(self._group.send([data], self._peer, number))

    def receive(self, data: Tensor, number: int) -> Transfer:
        return self._begun(self._group.recv([data], self._peer, number))

    def _begun(self, work: Any) -> Transfer:
        transfer = _Waited(work)
        self._under_way.put(transfer)
        return transfer

    def close(self) -> None:
        self._under_way.put(None)
        self._group = None  # closes its connections, which ends the other end's waiting


class _Streamed:
    """A transfer that a stream runs. *event*: recorded behind it."""

    def __init__(self, event: Any, device: torch.device, lane: _NcclLane):
        self._event, self._device, self._lane = event, device, lane
        self.fault: str | None = None

    def over(self) -> bool:
        if self._lane.closed:  # what was aborted ends like what has come
            self.fault = "its rank is gone"
            return True
        return bool(self._event.query())

    def usable(self) -> bool:
        return True

    def hand_over(self, data: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        data.record_stream(stream)  # its memory is the lane's stream's
        return data


class _NcclLane:
    """Between GPUs, on a stream of its own: its transfers wait for nothing that was launched after them."""

    def __init__(self, group: Any, peer: int, device: torch.device):
        self._group, self._peer, self._device = group, peer, device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.closed = False

    def empty(self, size: int) -> Tensor:
        with torch.cuda.stream(self._stream):  # from the stream's own memory: nothing that runs still reads there
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, data: Tensor, number: int) -> Transfer:
        del number  # NCCL knows the order alone
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._begun("send", data)

    def receive(self, data: Tensor, number: int) -> Transfer:
        del number
        return self._begun("recv", data)

    def _begun(self, operation: str, data: Tensor) -> Transfer:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            getattr(self._group, operation)([data], self._peer, 0).wait()  # the stream waits, and not this thread
            record(event, self._device)
        return _Streamed(event, self._device, self)

    def close(self) -> None:
        """NCCL's kernels would wait for the other rank for ever; ending them takes a moment, so a thread does."""
        self.closed = True
        threading.Thread(target=self._abort, args=(self._group,), name="tensor lane abort", daemon=True).start()
        self._group = None

    def _abort(self, group: Any) -> None:
        try:
            group.abort()
        except RuntimeError as error:
            log.warning("a communicator with a rank that is gone could not be given up: %s", error)


def lane_store(place: str, first: bool) -> tuple[Any, str]:
    """What two ranks meet over. *place*: a folder that both see; or ``tcp://HOST``, where *first* opens a port. Also
    returns where the other finds it."""
    if not place.startswith("tcp://"):
        return distributed.FileStore(str(Path(place, "lanes")), 2), place  # type: ignore[attr-defined]
    host, _, port = (f"{place}:0" if first else place).removeprefix("tcp://").rpartition(":")
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"), int(port), 2, is_master=first, timeout=_PATIENCE, wait_for_workers=False
    )
    return store, f"tcp://{host}:{store.port}"


def open_lane(backend: str, store: Any, name: str, number: int, device: torch.device, local: bool) -> Lane:
    """This rank's end, number 0 (which sends) or 1 (which receives), of the lane *name*. Waits for the other rank, and
    until a byte has passed.

    :param backend: ``gloo`` or ``nccl``. :param local: both ranks are on this machine.
    :raises RuntimeError: they do not reach each other.
    """
    own = distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
    lane: Lane
    if backend == "nccl":
        torch.cuda.set_device(device)  # of this thread
        lane = _NcclLane(_nccl_group(own, number, device), 1 - number, device)
    else:
        lane = _GlooLane(_gloo_group(own, number, local), 1 - number)
    probe = torch.full((1,), 7, dtype=torch.uint8, device=device) if number == 0 else lane.empty(1)
    transfer = lane.receive(probe, 0) if number else lane.send(probe, 0)
    _await(transfer, lane)
    if int(probe) != 7:
        raise RuntimeError("what arrives is not what was sent")
    return lane


def _await(transfer: Transfer, lane: Lane) -> None:
    """Wait until *transfer* is over, which nobody here has to do at any other time."""
    left, pause = _PATIENCE.total_seconds(), threading.Event()
    while not transfer.over() and left > 0:
        pause.wait(0.001)
        left -= 0.001
    if transfer.fault is not None or left <= 0:
        lane.close()
        raise RuntimeError(transfer.fault or f"nothing has passed within {_PATIENCE.total_seconds():.0f} s")


def _gloo_group(store: Any, number: int, local: bool) -> Any:
    kind: Any = distributed.ProcessGroupGloo
    if not local:
        return kind(store, number, 2, _PATIENCE)  # by the interface that GLOO_SOCKET_IFNAME names
    options = kind._Options()  # this machine's own name, which gloo would ask for, may lead nowhere
    options._devices = [kind.create_device(interface="lo0" if sys.platform == "darwin" else "lo")]
    options._timeout = _PATIENCE
    return kind(store, number, 2, options)


def _nccl_group(store: Any, number: int, device: torch.device) -> Any:
    # The group's watchdog would end this process when the other rank dies, whose executor knows what to do.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # Its transfers pass one after the other: that is what a lane is, and torch need not warn of it.
    os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "false"
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    options.is_high_priority_stream = True  # its few blocks do not queue behind those of a step
    if hasattr(options, "config"):
        options.config.max_ctas = _NCCL_CTAS
    group = distributed.ProcessGroupNCCL(store, number, 2, options)
    try:
        group.eager_connect_single_device(device)  # else the first transfer makes another communicator, for itself
    except RuntimeError:
        group.abort()
        raise
    return group
