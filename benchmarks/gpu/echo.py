"""One rank of several whose peers say at once what it says: what a step of it takes, but for the way between GPUs.

One GPU runs all kernels that a rank of a mesh runs, with the shares of its weights, in time with nobody. What comes out
is no model's answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mstar.nn.mesh import Group
from mstar.nn.symmetric import SymmetricReducer

__all__ = ["echoing"]


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
    reducer = None
    if device.type == "cuda" and symmetric_bytes > 0:
        from mstar.nn.ops.cuda_sums import echoing as echoing_mail

        reducer = SymmetricReducer(None, device, symmetric_bytes, echoing_mail(0, size, symmetric_bytes // 4, device))
    return _EchoGroup(0, size, None, False, reducer)
