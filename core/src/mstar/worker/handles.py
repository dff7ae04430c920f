"""Values that lie on another rank, and how rank 0 names them.

A step's outputs stay where they were computed. Rank 0 knows each by a *key*; it sends the key when a later step on that
rank wants the value, and the contents only to ranks that do not have them. When rank 0 lets go of a value, so does the
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.graph.values import Ref
from mstar.resources.staging import Late, to_device
from mstar.worker.lanes import Transfer
from mstar.worker.messages import Contents, Part

__all__ = ["Arriving", "Handle", "held", "output_key", "pack", "ref_of", "unpack"]


class Handle:
    """Rank 0's hold on a value of another rank. Let go of, it puts its key into *dropped*."""

    __slots__ = ("_dropped", "key")

    def __init__(self, key: int, dropped: list[int]):
        self.key, self._dropped = key, dropped

    def goes_to(self, dropped: list[int]) -> bool:
        """Whether *dropped* is where its key will go: of the process that has the value."""
        return self._dropped is dropped

    def __del__(self) -> None:
        self._dropped.append(self.key)


class Arriving:
    """What stands in a message for a tensor that a lane brings: *data*, uint8 ``[n]``, once *transfer* is over."""

    __slots__ = ("_data", "transfer")

    def __init__(self, data: Tensor, transfer: Transfer):
        self._data, self.transfer = data, transfer

    def there(self) -> bool:
        """Whether it has come. What fails on its way never does."""
        return self.transfer.over() and self.transfer.fault is None

    def bytes(self) -> Tensor:
        """*data*, on its device; for a step that reads it, once it is usable."""
        return self.transfer.hand_over(self._data)


def output_key(step: int, call: int, port: int) -> int:
    """The key of the tensor that holds output *port* of the step's calls from *call* on. Every rank that runs a step
    names its outputs so without being told. Keys of values that rank 0 sends are negative."""
    return (step << 24) | (call << 8) | port


def pack(key: int, tensor: Tensor, contents: bool = True) -> Contents:
    """*tensor* as a message; without *contents* only what it looks like."""
    data = None
    if contents:
        # without autograd's marks, on the CPU (by pinned memory, which is faster), as bytes: numpy knows no bfloat16
        flat = Late(tensor.detach()).tensor().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return Contents(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def unpack(contents: Contents, device: torch.device) -> Tensor:
    """The tensor on *device*; on the meta device if its contents were not sent."""
    dtype = getattr(torch, contents.dtype)
    if isinstance(contents.data, Arriving):
        return contents.data.bytes().view(dtype).view(contents.shape).to(device)
    if contents.data is None:
        return torch.empty(contents.shape, dtype=dtype, device="meta")
    if not contents.data.size:
        return torch.empty(contents.shape, dtype=dtype, device=device)
    return to_device(torch.from_numpy(contents.data).view(dtype).reshape(contents.shape), device)


def ids_of(tensor: Tensor) -> Sequence[int] | None:
    """The numbers of a list of ids, which resources may want on the host."""
    return (
        tensor.tolist() if tensor.ndim == 1 and not tensor.is_floating_point() and tensor.device.type == "cpu" else None
    )


def held(contents: Contents, device: torch.device) -> tuple[Tensor, Any]:
    """The tensor, and what the host knows of it."""
    if isinstance(contents.data, Arriving):
        return unpack(contents, device), None
    tensor = unpack(contents, torch.device("cpu"))
    return to_device(tensor, device), ids_of(tensor)


def ref_of(part: Part, base: Tensor, host: Any) -> Ref:
    """*part* of *base*. *host*: what the host knows of all of *base*."""
    known = part.host if part.host is not None else (host[part.start : part.stop] if host and not part.row else None)
    return Ref(base, part.start, part.stop, part.row, host=known)
