"""The way for large tensors between rank 0 and another rank, both ways, beside the messages that announce them.

A message holds a small tensor itself. Of a large one it says what it looks like and which of its lane's it is
(:attr:`mstar.worker.messages.Contents.number`); it is sent when the message is, in the messages' order, and the
other end makes room and receives it when it reads the message. So neither end waits, and what is not announced is not
sent. Until the lanes are open, and where they cannot be opened, messages hold everything, large arrays in shared memory
(:mod:`mstar.cluster.links`): whoever sends decides, for each tensor.

*Back-pressure.* A receive that is over is the credit for the next send: beyond a bound of bytes on the way an end says
that it has no room, and no step, landing or move is begun that would send more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.worker.handles import Arriving, pack
from mstar.worker.lanes import Lane, Transfer, open_lane
from mstar.worker.messages import Contents, Exported, Held, Import, Landed, Run

__all__ = ["LARGE_BYTES", "TensorChannel", "arrived", "way_between"]

log = logging.getLogger(__name__)

LARGE_BYTES = 65536
"""Tensors of at least so many bytes go by a lane. Between two H200 a smaller one is there sooner with its message
(``benchmarks/ranks_gpu.py``, part ``values``)."""
_LARGE_FROM_RANK_0 = 8192
"""Of those that rank 0 sends: it would have to wait for them, and for the step that it has launched since, while other
ranks' outputs come to the host right behind their step."""
_ON_THE_WAY = 1 << 28
"""Bytes on the way in one direction beyond which nothing is begun that sends more."""
_LONGEST_S = 60.0
"""A transfer that takes longer will not come."""
_TORCH = {"nccl": "cuda", "gloo": "cpu"}


def way_between(asked: str | None, here: str, there: str, shared: bool = False) -> tuple[str, str]:
    """How values pass between two ranks on devices of the types *here* and *there*: ``nccl``, ``gloo`` or ``shm``, and
    why. *asked*: what the deployment says (``engine.values``). *shared*: if these are GPUs, they are the same one."""
    wanted = asked or ("nccl" if here == "cuda" else "shm")
    if wanted == "nccl" and here == there == "cuda" and shared:
        return "shm", "the ranks share a GPU, and NCCL knows one rank of each"
    if wanted == "shm":
        return "shm", "engine.values says so" if asked else f"the ranks are on {_of(here, there)}"
    if {here, there} != {_TORCH[wanted]}:
        return "shm", f"{wanted} is for ranks on {_TORCH[wanted]}, and these are on {_of(here, there)}"
    return wanted, "engine.values says so" if asked else "both ranks have a GPU"


def _of(here: str, there: str) -> str:
    return " and ".join(dict.fromkeys((here, there)))


class _UnderWay:
    __slots__ = ("began", "data", "transfer")

    def __init__(self, data: Tensor, transfer: Transfer):
        self.data, self.transfer, self.began = data, transfer, time.monotonic()  # kept until it is sent


class TensorChannel:
    """One rank's end. Used by one thread.

    :param number: 0 on rank 0, 1 on the other. :param device: where tensors are, and arrive.
    :ivar fault: why what was announced will not come, if it broke after it was open.
    """

    def __init__(self, number: int, device: torch.device):
        self._number, self.device = number, device
        self.backend: str | None = None
        self.fault: str | None = None
        self._opening: threading.Thread | None = None
        self._opened: tuple[Lane, Lane] | str | None = None  # (to send, to receive), or why not
        self.closed = False
        self._lanes: tuple[Lane, Lane] | None = None
        self._sends = False  # whether the other end is known to be open, too
        self._ready: dict[int, Tensor] = {}  # what messages under construction name
        self._numbers = [1, 1]  # of the next to send, and to receive
        self._sending: deque[_UnderWay] = deque()
        self._coming: deque[_UnderWay] = deque()
        self._bytes = 0
        self.sent = self.received = 0
        """Bytes that went by the lanes."""

    # --- opening ------------------------------------------------------------------------------------------------------
    def begin(self, backend: str, meet: Callable[[], Any], local: bool) -> None:
        """Open the lanes, in a thread, together with the other end. *meet*: gives the store that both ends see.
        *local*: both are on this machine."""
        self.backend = backend
        self._opening = threading.Thread(
            target=self._open, args=(backend, meet, local), name="tensor lanes", daemon=True
        )
        self._opening.start()

    def _open(self, backend: str, meet: Callable[[], Any], local: bool) -> None:
        found: list[Lane] = []
        try:
            store = meet()
            for name, sender in (("down", 0), ("up", 1)):  # both ends in one order
                found.append(open_lane(backend, store, name, self._number ^ sender, self.device, local))
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:  # a torch that has no NCCL, say
            for lane in found:
                lane.close()
            self._opened = str(error).splitlines()[0] or type(error).__name__
        else:
            self._opened = (found[self._number], found[1 - self._number])
            if self.closed:
                for lane in found:
                    lane.close()

    @property
    def opening(self) -> bool:
        return self._opening is not None

    def opened(self) -> str | None:
        """Asked while it is opening: an empty text when it has been opened, else why it could not be; ``None``: not
        yet."""
        if self._opening is None or self._opened is None or self.closed:
            return None
        self._opening.join()
        self._opening = None
        if isinstance(self._opened, str):
            return self._opened or "it could not be opened"
        self._lanes = self._opened
        return ""

    def use(self) -> None:
        """Both ends are open: what is packed from now on goes by the lanes."""
        self._sends = self._lanes is not None

    @property
    def way(self) -> str:
        """How large tensors go from here now."""
        return self.backend or "shm" if self._sends else "shm"

    # --- sending ------------------------------------------------------------------------------------------------------
    def takes(self, tensor: Tensor) -> bool:
        """Whether *tensor* would go by a lane. Lists of ids do not: resources want them on the host."""
        return (
            self._sends
            and tensor.device.type == self.device.type
            and tensor.nbytes >= (LARGE_BYTES if self._number else min(LARGE_BYTES, _LARGE_FROM_RANK_0))
            and (tensor.ndim > 1 or tensor.is_floating_point())
        )

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self._bytes < _ON_THE_WAY

    def pack(self, key: int, tensor: Tensor) -> Contents:
        """*tensor* for a message, which goes through :meth:`launch` before anything else does."""
        if not self.takes(tensor):
            return pack(key, tensor)
        number = -1 - len(self._ready)  # until it is launched
        self._ready[number] = tensor.detach().contiguous()
        return Contents(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None, number)

    def launch(self, messages: list[Any]) -> list[Any]:
        """Send what *messages* name, which go out now, as returned. What no message names is forgotten."""
        if not self._ready:
            return messages
        try:
            return [_with_contents(message, self._launched) for message in messages]
        except RuntimeError as error:  # the connection has ended: so will the other rank, if it has not yet
            self.fault = self.fault or str(error).splitlines()[0]
            return messages
        finally:
            self._ready.clear()

    def _launched(self, contents: Contents) -> Contents:
        if contents.number is None or contents.number > 0:
            return contents
        assert self._lanes is not None
        data = _bytes(self._ready[contents.number])
        number = self._numbers[0]
        self._sending.append(_UnderWay(data, self._lanes[0].send(data, number)))
        self._numbers[0] += 1
        self._bytes += data.nbytes
        self.sent += data.nbytes
        return msgspec.structs.replace(contents, number=number)

    # --- receiving ----------------------------------------------------------------------------------------------------
    def resolve(self, message: Any) -> Any:
        """*message*, which has just come, with what arrives for it in place of numbers. Each message once, in order."""
        if not isinstance(message, Run | Import | Landed | Exported):
            return message
        return _with_contents(message, self._awaited)

    def _awaited(self, contents: Contents) -> Contents:
        if contents.number is None:
            return contents
        if self._lanes is None or contents.number != self._numbers[1]:
            raise ValueError(f"tensor {contents.number} is announced, and {self._numbers[1]} comes next")
        self._numbers[1] += 1
        dtype = getattr(torch, contents.dtype)
        data = self._lanes[1].empty(dtype.itemsize * torch.Size(contents.shape).numel())
        transfer = self._lanes[1].receive(data, contents.number)
        self._coming.append(_UnderWay(data, transfer))
        self.received += data.nbytes
        return Contents(contents.key, contents.dtype, contents.shape, Arriving(data, transfer))

    # --- driven -------------------------------------------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Whether something is on its way, of which nobody will tell."""
        return (self.opening and not self.closed) or bool(self._sending or self._coming)

    @property
    def on_the_way(self) -> int:
        """Tensors that are being sent and received."""
        return len(self._sending) + len(self._coming)

    @property
    def hurries(self) -> bool:
        """Whether what comes is a matter of microseconds, and worth looking for again at once."""
        return self.backend == "nccl" and bool(self._coming)

    def step(self) -> None:
        """Let go of what has passed; notice what will not."""
        for under_way in (self._sending, self._coming):
            while under_way and under_way[0].transfer.over():
                done = under_way.popleft()
                if under_way is self._sending:
                    self._bytes -= done.data.nbytes
                if done.transfer.fault is not None and self.fault is None:
                    self.fault = done.transfer.fault
            if under_way and time.monotonic() - under_way[0].began > _LONGEST_S and self.fault is None:
                self.fault = f"a tensor has not passed within {_LONGEST_S:.0f} s"

    def close(self) -> None:
        """The other rank is gone, or this one ends."""
        self.closed, self._sends = True, False
        lanes, self._lanes = self._lanes, None
        for lane in lanes or ():
            lane.close()
        self._ready.clear()
        self._sending.clear()
        self._coming.clear()
        self._bytes = 0


def arrived(message: Any, on_host: bool = True) -> bool:
    """Whether all that was announced with *message* is there; or, without *on_host*, whether the device may be told to
    read it."""
    return all(
        contents.data.there() if on_host else contents.data.transfer.usable()
        for contents in _contents_of(message)
        if isinstance(contents.data, Arriving)
    )


def _contents_of(message: Any) -> Iterator[Contents]:
    match message:
        case Run():
            yield from message.values
        case Landed():
            yield from message.bases
        case Import() | Exported():
            yield from (contents for held in message.held for contents in held.tensors.values())


def _with_contents(message: Any, change: Callable[[Contents], Contents]) -> Any:
    """*message* with each :class:`Contents` in it *change*\\ d, in one order at both ends."""
    if all(contents.number is None for contents in _contents_of(message)):
        return message
    match message:
        case Run():
            return msgspec.structs.replace(message, values=[change(one) for one in message.values])
        case Landed():
            return msgspec.structs.replace(message, bases=[change(one) for one in message.bases])
        case _:
            return msgspec.structs.replace(message, held=[_with_tensors(held, change) for held in message.held])


def _with_tensors(held: Held, change: Callable[[Contents], Contents]) -> Held:
    tensors = {name: change(contents) for name, contents in sorted(held.tensors.items())}
    return msgspec.structs.replace(held, tensors=tensors)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
