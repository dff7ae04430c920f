"""Telling an error of the device, after which nothing on it works, from an error of a request.

After some CUDA errors (an illegal address, an assertion in a kernel, a memory fault) the process's context is lost:
every further call on the device fails with the same error. Running such a step in halves would blame one request after
the other, and all later ones. The worker has to end; its executor starts it anew, or reports it. NVIDIA's reference of
``cudaError`` says which errors leave "the process in an inconsistent state".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from mstar.spec.errors import PeerLost

__all__ = ["DeviceLost", "MeshLost", "is_lost", "raise_if_lost"]

_DEVICE = re.compile(r"\b(CUDA|HIP) error\b|\bcuDNN error\b|Triton Error \[(CUDA|HIP)\]")
"""How libraries begin what they say of a device's error. PyTorch has a class of its own for most, but not for all."""

_KEEPS_WORKING = re.compile(
    r"out of memory|invalid (argument|configuration argument|resource handle|device ordinal)"
    r"|too many resources requested for launch|STATUS_(NOT_SUPPORTED|INVALID_VALUE|BAD_PARAM|ALLOC_FAILED)"
)
"""A call that was refused: the device did nothing, so that other requests are served as before."""

_EXCHANGE = re.compile(r"\bgloo\b|\bNCCL\b|ncclInvalidUsage|ncclRemoteError", re.IGNORECASE)
"""What an exchange among the processes of a mesh says when one of them is gone or does something else. Nothing can be
exchanged after that."""
_WHERE = re.compile(r"^\[\S*:\d+\] ")
"""A place in their source, which they begin with."""


class DeviceLost(RuntimeError):
    """The device of this worker does not work any more; the cause is what it said."""


class MeshLost(DeviceLost, PeerLost):
    """Nothing can be exchanged within this rank's mesh any more."""


def is_lost(error: BaseException) -> bool:
    """Whether *error*, or one that led to it, says that the device is lost.

    Any error of the device counts (:class:`torch.AcceleratorError`, or by its text), except those of calls that were
    refused: memory that ran out, a launch with wrong sizes.
    """
    return any(_says_lost(link) for link in _chain(error))


def raise_if_lost(error: BaseException) -> None:
    """Raise :class:`DeviceLost` (:class:`MeshLost`) if that is what *error* means: for the handlers that blame a
    request."""
    if isinstance(error, DeviceLost):
        raise error
    for link in _chain(error):
        if _says_lost(link):
            said = next(iter(str(link).splitlines()), type(link).__name__)
            if _EXCHANGE.search(said):
                reason = _WHERE.sub("", said).partition(". ")[0]
                raise MeshLost(f"another rank of its mesh is gone, or does something else ({reason})") from error
            raise DeviceLost(f"the device is lost ({said}); every request on it has failed") from error


def _says_lost(error: BaseException) -> bool:
    if isinstance(error, DeviceLost):
        return True
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if _EXCHANGE.search(text):
        return True
    if not (isinstance(error, torch.AcceleratorError) or _DEVICE.search(text)):
        return False
    return _KEEPS_WORKING.search(text.partition("\n")[0]) is None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """*error*, and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
