"""Small messages between GPUs that see each other's memory: one kernel for a sum or for rows gathered.

A decode step adds a few kilobytes up twice a layer, where NCCL's rings spend their time on hops. With PyTorch's
symmetric memory each rank writes its part straight into a buffer of each peer (:mod:`mstar.nn.ops.cuda_sums`), which
has all of them on its own GPU and adds them. Every rank sends ``ranks - 1`` messages, so it is for small ones.
Multicast is not used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mstar.nn import ops

if TYPE_CHECKING:
    from mstar.nn.ops.cuda_sums import Mail

__all__ = ["SymmetricReducer", "symmetric_fault"]


def symmetric_fault(device: torch.device) -> str | None:
    """Why messages cannot go through symmetric memory on *device*, or ``None``."""
    if device.type != "cuda":
        return "symmetric memory is for GPUs"
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no symmetric memory: {error}"
    return ops.cuda_kernels_fault()


class SymmetricReducer:
    """Messages of up to *most* bytes over the ranks of process group *handle*, which make the same calls in the same
    order. Works within captured graphs. On the device calls must follow one another: streams that use it wait for each
    other.

    On each rank it takes ``4 × ranks × most`` bytes of device memory.

    :raises RuntimeError: :func:`symmetric_fault`, or the GPUs cannot map each other's memory.
    """

    def __init__(self, handle: Any, device: torch.device, most: int):
        fault = symmetric_fault(device)
        if fault is not None:
            raise RuntimeError(fault)
        from mstar.nn.ops import cuda_sums

        self._handle, self._device, self._sums = handle, device, cuda_sums
        self._kept: list[Any] = []
        self._mail = self._opened(most // 4, cuda_sums.PROGRAMS)

    def _opened(self, room: int, programs: int) -> Mail:
        """A way to the peers, in memory of its own."""
        import torch.distributed._symmetric_memory as symmetric

        # without it torch makes a multicast object for every buffer, whose faults outlive the process
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

        rank, size, device = self._handle.rank(), self._handle.size(), self._device
        inbox = symmetric.empty(2, size, room, dtype=torch.int64, device=device)
        inbox.zero_()
        calls = torch.zeros(programs, dtype=torch.int32, device=device)
        # No rank returns from the meeting before all have come to it, so nothing is sent into what is not yet zeros.
        torch.cuda.synchronize(device)
        shared = symmetric.rendezvous(inbox, self._handle.group_name)
        self._kept += [inbox, shared]
        buffers = [shared.get_buffer(peer, inbox.shape, inbox.dtype) for peer in range(size)]
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
        return self._sums.Mail(rank, size, room, addresses, calls)

    def takes(self, x: Tensor) -> bool:
        """Whether *x* is a message for it: decided by shape and dtype, so alike on every rank."""
        return self._sums.takes(self._mail, x)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' *x*, contiguous and overwritten: in float32 in the order of the ranks, rounded once."""
        return self._sums.reduce(self._mail, x)

    def add(self, residual: Tensor, x: Tensor) -> None:
        """Add the sum of all ranks' *x* to *residual*, in place, with one rounding: both contiguous and alike."""
        self._sums.add(self._mail, residual, x)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' *x* ``[..., N]``, contiguous, beside each other: ``[..., ranks * N]``, a new tensor."""
        return self._sums.gather(self._mail, x)
