"""One rank of several whose peers say at once what it says: what a step of it takes, but for the way between GPUs.

A message to peer *p* goes to where the rank itself looks for what *p* sends. So one GPU runs all kernels that a rank of
a mesh runs, with the shares of its weights, in time with nobody. What comes out is no model's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mstar.nn.mesh import Group
from mstar.nn.symmetric import SymmetricReducer

if TYPE_CHECKING:
    from mstar.nn.ops.cuda_sums import Mail

__all__ = ["echoing"]


class _EchoReducer(SymmetricReducer):
    def __init__(self, size: int, device: torch.device, most: int):
        self._size = size
        super().__init__(None, device, most)

    def _opened(self, room: int, programs: int) -> Mail:
        inbox = torch.zeros(2, self._size, room, dtype=torch.int64, device=self._device)
        self._kept.append(inbox)
        addresses = [inbox.data_ptr() + peer * room * inbox.itemsize for peer in range(self._size)]
        calls = torch.zeros(programs, dtype=torch.int32, device=self._device)
        return self._sums.Mail(0, self._size, room, torch.tensor(addresses, device=self._device), calls)


class _EchoGroup(Group):
    def all_reduce(self, x: Tensor) -> Tensor:
        if self.reducer is not None and self.reducer.takes(x):
            return self.reducer.reduce(x.contiguous())
        return x.mul_(self.size)

    def least(self, value: int) -> int:
        return value

    def _gathered(self, x: Tensor) -> Tensor:
        return x.expand(self.size, *x.shape).contiguous()


def echoing(size: int, device: torch.device, symmetric_bytes: int) -> Group:
    """Rank 0 of a group of *size*, by itself."""
    on_gpu = device.type == "cuda" and symmetric_bytes > 0
    return _EchoGroup(0, size, None, False, _EchoReducer(size, device, symmetric_bytes) if on_gpu else None)
