"""Small messages between GPUs that see each other's memory: one kernel for a sum or for rows gathered.

A decode step adds a few kilobytes up twice a layer, where NCCL's rings spend their time on hops. With PyTorch's
symmetric memory each rank writes its part straight into a buffer of each peer (:mod:`mstar.nn.ops.cuda_sums`), which
has all of them on its own GPU and adds them. Every rank sends ``ranks - 1`` messages, so it is for small ones.
Multicast is not used.

What it rests on (stores of one GPU that another sees, whole) is tried when it is opened, on the machine where it is
used: :func:`open_reducer`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mstar.nn import ops
from mstar.spec.errors import SetupError

if TYPE_CHECKING:
    from mstar.nn.ops.cuda_sums import Mail

__all__ = ["SymmetricReducer", "open_reducer", "symmetric_fault"]

PATIENCE_S = 10.0
"""Within which what all ranks have sent must be there."""
_WORD = 4
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_MISSING, _WRONG, _RIGHT = range(3)


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

    :param mail: another way than to the ranks of *handle*.
    :raises RuntimeError: :func:`symmetric_fault`, or the GPUs cannot map each other's memory.
    """

    def __init__(self, handle: Any, device: torch.device, most: int, mail: Mail | None = None):
        fault = symmetric_fault(device)
        if fault is not None:
            raise RuntimeError(fault)
        from mstar.nn.ops import cuda_sums

        self.most = max(most // _WORD, 1) * _WORD
        self._device, self._sums = device, cuda_sums
        self._mail = _opened(handle, device, self.most // _WORD) if mail is None else mail

    def echo(self) -> SymmetricReducer:
        """One with the same kernels whose peers say what this rank says: it waits for nobody."""
        mail = self._mail
        return SymmetricReducer(
            None, self._device, self.most, self._sums.echoing(mail.rank, mail.size, mail.room, self._device)
        )

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


def _opened(handle: Any, device: torch.device, room: int) -> Mail:
    import torch.distributed._symmetric_memory as symmetric

    from mstar.nn.ops import cuda_sums

    # without it torch makes a multicast object for every buffer, whose faults outlive the process
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

    rank, size = handle.rank(), handle.size()
    inbox = symmetric.empty(2, size, room, dtype=torch.int64, device=device)
    inbox.zero_()
    calls = torch.zeros(cuda_sums.PROGRAMS, dtype=torch.int32, device=device)
    # No rank returns from the meeting before all have come to it, so nothing is sent into what is not yet zeros.
    torch.cuda.synchronize(device)
    shared = symmetric.rendezvous(inbox, handle.group_name)
    buffers = [shared.get_buffer(peer, inbox.shape, inbox.dtype) for peer in range(size)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
    return cuda_sums.Mail(rank, size, room, addresses, calls, (inbox, shared))


# --- is it right here? ------------------------------------------------------------------------------------------------
def open_reducer(
    handle: Any,
    device: torch.device,
    most: int,
    least: Callable[[int], int],
    make: Callable[[Any, torch.device, int], Any] = SymmetricReducer,
) -> tuple[Any, str | None]:
    """A :class:`SymmetricReducer` that has been tried, the same on all ranks, or ``None`` and why there is none.

    It is tried twice. By itself first, which loads every kernel: the driver might wait with that for a kernel that
    waits for a peer. Then with the peers, until a deadline: a kernel that waits cannot be stopped.

    :param least: gives every rank the smallest of what they say. :param make: what makes one.
    :raises SetupError: on all ranks, if something that was sent has not come to one of them.
    """
    reducer, fault = None, None
    try:
        reducer = make(handle, device, most)
        alone = _wrong(reducer.echo(), handle.rank(), [handle.rank()] * handle.size(), device)
        if int(alone):
            fault = "its kernels give wrong numbers on this GPU"
    except RuntimeError as error:
        fault = str(error)
    if not least(fault is None):
        return None, fault or "another rank has none"
    assert reducer is not None
    wrong = _wrong(reducer, handle.rank(), range(handle.size()), device)
    least(0)  # all have sent all, and may wait
    found = _MISSING if not _settled(device) else _WRONG if int(wrong) else _RIGHT
    agreed = least(found)
    if agreed == _MISSING:
        raise SetupError(
            f"{'a' if found == _MISSING else 'another'} GPU of this mesh has waited {PATIENCE_S:.0f} s for what the "
            "others wrote into its memory; with engine.symmetric_bytes: 0 sums go through NCCL"
        )
    return (reducer, None) if agreed == _RIGHT else (None, "numbers arrive wrong on one of the GPUs")


def _wrong(reducer: Any, rank: int, heard: Sequence[int], device: torch.device) -> Tensor:
    """How many numbers are wrong of sums and rows, short and as long as there are, of every dtype; each twice, so in
    both slots. All are small and whole, and exact therefore. Nothing waits for the device.

    :param heard: whose numbers come, in the order of the ranks.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for dtype in _TYPES:
        width = reducer.most // dtype.itemsize
        for call, length in enumerate([min(width, 8), width] * 2):
            place = torch.arange(length, device=device).unsqueeze(0)
            parts = [(place % 7 + sender + call).to(dtype) for sender in heard]
            stream, total = (place % 5).to(dtype), sum(parts[1:], parts[0])
            expected = stream + total
            reducer.add(stream, (place % 7 + rank + call).to(dtype))
            rows = reducer.gather((place % 7 + rank + call).to(dtype))
            found = reducer.reduce((place % 7 + rank + call).to(dtype))
            for got, right in ((stream, expected), (rows, torch.cat(parts, 1)), (found, total)):
                wrong += (got != right).sum()
    return wrong


def _settled(device: torch.device) -> bool:
    """Whether all that was launched on *device* ends before the patience does."""
    if device.type != "cuda":
        return True
    until, event = time.monotonic() + PATIENCE_S, torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
