"""The way of a step's host data to the device, and of its results back.

What a step needs on the device beside its inputs (positions, page tables, slot numbers, random numbers) is computed on
the host when the step is planned. Resources hand it to the :class:`Stage`, which gives back the tensor that will hold
it; :meth:`Stage.send` then copies everything at once, asynchronously, from pinned memory.

A step that a captured graph will run (see :mod:`mstar.engine.graphs`) is planned on a :class:`Lane`: its tensors keep
their addresses from step to step, and its rows and tokens are padded to the size that was captured. A resource that can
be used in such steps (:attr:`mstar.resources.base.Resource.capturable`) makes as many rows as :meth:`Stage.rows` says,
with as many tokens as :meth:`Stage.lengths` says, the added ones pointing at places that nothing reads, and keeps what
a graph holds on to with :meth:`Stage.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Lane", "Late", "Stage", "record", "to_device"]

_BLOCK = 1 << 16
"""Bytes of one block. Arrays that are larger get a block of their own."""
_ALIGN = 16
_AHEAD = 4
"""Copies of the host's side: as many steps may be planned before the device has fetched the first."""


class _Block:
    """Some bytes on the device, and their sources in pinned memory, one for each step in flight."""

    def __init__(self, size: int, device: torch.device):
        pin = device.type == "cuda"
        with torch.inference_mode(False):  # ordinary tensors: written in and out of inference mode
            self.device = torch.empty(size, dtype=torch.uint8, device=device)
            self.pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(_AHEAD)]
        self.arrays = [pinned.numpy() for pinned in self.pinned]
        self.used = 0
        self.low = self.high = 0  # what of it the step that is planned sends


class _Place(NamedTuple):
    """Where one array of a lane lies: bytes of a block, from *start* on, as a *tensor* on the device and as *arrays* in
    pinned memory, one for each step in flight."""

    block: _Block
    start: int
    tensor: Tensor
    arrays: list[npt.NDArray[Any]]


class Lane:
    """The static tensors of one captured step. Filled anew for each replay.

    :param variants: resource → the variant that its view runs (:meth:`mstar.resources.base.Resource.variant`).
    :param tokens: of all rows together; by default each row has one. More than *rows* otherwise: then the first row of
        the padding, of which there is at least one, takes what the step's rows leave, and the others have none.
    :ivar real: rows and tokens, without padding, of the step that is planned on it.
    :ivar trial: the step runs as plain calls, before it is captured: it loads and compiles what the capture must find
        ready, and shows what it will use.
    :ivar graph: the engine's recording. :ivar key: what the engine knows the lane by.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        variants: Mapping[str, Hashable] | None = None,
        tokens: int | None = None,
    ):
        self.rows, self.device, self.variants = rows, device, variants or {}
        self.tokens = rows if tokens is None else tokens
        self.real = (self.rows, self.tokens)
        self.trial = False
        self.graph: Any = None
        self.key: Hashable = None
        self.blocks: list[_Block] = []
        self.tensors: dict[str, _Place] = {}
        self.kept: dict[str, Any] = {}

    def place(self, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Place:
        """Where the array *key* of *shape* lies: fixed at its first use."""
        found = self.tensors.get(key)
        if found is None:
            size = int(np.prod(shape)) * dtype.itemsize
            block = self._block(size)
            start, block.used = block.used, block.used + -(-size // _ALIGN) * _ALIGN
            tensor = _typed(block.device[start : start + size], dtype).view(shape)
            arrays = [array[start : start + size].view(dtype).reshape(shape) for array in block.arrays]
            found = self.tensors[key] = _Place(block, start, tensor, arrays)
        elif found.arrays[0].shape != shape:
            raise ValueError(f"a captured step's {key} has shape {found.arrays[0].shape} and cannot take {shape}")
        return found

    def _block(self, size: int) -> _Block:
        if size > _BLOCK:
            block = _Block(size, self.device)
            self.blocks.append(block)
            return block
        for block in self.blocks:
            if block.device.shape[0] == _BLOCK and block.used + size <= _BLOCK:
                return block
        self.blocks.append(_Block(_BLOCK, self.device))
        return self.blocks[-1]


class Stage:
    """One for each worker: the resources of a step put their arrays here between :meth:`begin` and :meth:`send`."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._direct = self.device.type == "cpu"
        self.lane: Lane | None = None
        self._turn = 0
        self._events: list[Any] = [None] * _AHEAD
        self._sends: list[_Block] = []
        self._spare: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * _AHEAD
        self._filled = 0

    def begin(self, lane: Lane | None = None) -> None:
        """A new step, planned on *lane* or, without one, with tensors of its own."""
        self.lane = lane
        for block in self._sends:
            block.low = block.high = 0
        self._sends.clear()
        self._filled = 0
        if not self._direct:
            self._turn = (self._turn + 1) % _AHEAD
            event = self._events[self._turn]
            if event is not None:
                event.synchronize()  # the device has fetched what was planned _AHEAD steps ago

    def rows(self, real: int) -> int:
        """How many rows this step's tensors have: *real*, or the lane's."""
        return real if self.lane is None else self.lane.rows

    def lengths(self, real: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each row, int64 ``[rows]``: *real*, and on a lane those of the padding. See :class:`Lane`."""
        lane = self.lane
        if lane is None or len(real) == lane.rows:
            return real
        padded = np.zeros(lane.rows, np.int64)
        padded[: len(real)] = real
        if lane.tokens == lane.rows:
            padded[len(real) :] = 1
        else:
            padded[len(real)] = lane.tokens - real.sum()
        return padded

    def keep(self, key: str, make: Callable[[], Any]) -> Any:
        """What *make* gives; on a lane, what it gave when the lane was new."""
        if self.lane is None:
            return make()
        if key not in self.lane.kept:
            self.lane.kept[key] = make()
        return self.lane.kept[key]

    def put(self, key: str, array: npt.NDArray[Any], room: int | None = None) -> Tensor:
        """The device's copy of *array*; it holds the values once the step is sent.

        :param key: unlike any other of the step; a resource's begin with its name.
        :param room: on a lane, how long the tensor is along the first dimension, of which *array* fills a part; the
            rest holds what it held before. By default *array* has its full size in every step of the lane.
        """
        if self.lane is not None:
            return self._put_static(self.lane, key, array, room)
        if self._direct:
            return torch.from_numpy(array)
        size = array.nbytes
        pinned = self._pinned(size)
        pinned.numpy()[:] = _bytes(array)
        tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
        tensor.copy_(pinned, non_blocking=True)
        return _typed(tensor, array.dtype).view(array.shape)

    def _put_static(self, lane: Lane, key: str, array: npt.NDArray[Any], room: int | None) -> Tensor:
        shape = array.shape if room is None else (room, *array.shape[1:])
        block, start, tensor, arrays = lane.place(key, shape, array.dtype)
        filled = array.shape[0]
        if filled > shape[0]:
            raise ValueError(f"a captured step's {key} holds {shape[0]} entries, not {filled}")
        arrays[self._turn][:filled] = array
        end = start + array.nbytes
        if block.high == 0:
            block.low, block.high = start, end
            self._sends.append(block)
        else:
            block.low, block.high = min(block.low, start), max(block.high, end)
        return tensor

    def _pinned(self, size: int) -> Tensor:
        """*size* bytes of this turn's pinned memory."""
        start = self._filled
        self._filled = end = start + -(-size // _ALIGN) * _ALIGN
        if self._spare[self._turn].shape[0] < end:
            # What was taken from the old one this turn is still being copied from: the allocator keeps it until then.
            grown = torch.empty(max(2 * end, _BLOCK), dtype=torch.uint8, pin_memory=True)
            self._spare[self._turn] = grown
        return self._spare[self._turn][start : start + size]

    def send(self) -> None:
        """Copy what was put on a lane to the device, behind what the device was told to do before."""
        for block in self._sends:
            low, high = block.low, block.high
            block.device[low:high].copy_(block.pinned[self._turn][low:high], non_blocking=True)
        if not self._direct:
            event = self._events[self._turn]
            if event is None:
                event = self._events[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record(event, self.device)


def record(event: Any, device: torch.device) -> None:
    """Record *event*, a ``torch.cuda.Event``, on the current stream of *device*.

    An event that is given no stream looks for the current device's by its name, which costs more than the record."""
    index = device.index
    event.record(torch.cuda.current_stream(torch.cuda.current_device() if index is None else index))


def to_device(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of *data* (an array, a tensor on the CPU, numbers) on *device*; does not wait for what the device is
    doing, as a plain copy from pageable memory does."""
    host = torch.as_tensor(data, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Late:
    """A tensor on its way to the host; who reads it waits until the device has computed it."""

    __slots__ = ("_copy", "_event", "_values")

    def __init__(self, tensor: Tensor):
        self._event: Any = None
        self._values: list[Any] | None = None
        self._copy = tensor
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            record(self._event, tensor.device)

    def done(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._event is None or bool(self._event.query())

    def tensor(self) -> Tensor:
        """On the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy

    def values(self) -> list[Any]:
        """As Python numbers."""
        if self._values is None:
            self._values = self.tensor().tolist()
        return self._values


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _typed(data: Tensor, dtype: np.dtype[Any]) -> Tensor:
    return data.view(torch.from_numpy(np.empty(0, dtype)).dtype)
