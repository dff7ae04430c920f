"""Values of requests, and how a step's rows are gathered from them and split back.

A step's output for all rows is one tensor; each request's value is a :class:`Ref` into it. When the next step has the
same rows in the same order, as in steady decode, gathering finds that all refs lie side by side in one tensor and takes
a view: no tensor is touched per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.resources.staging import Late, to_device
from mstar.spec.errors import RequestError
from mstar.spec.graph import Port

__all__ = ["Ref", "as_tensor", "gather_hosted", "gather_list", "gather_packed", "gather_stacked", "torch_dtype"]


class Ref:
    """One request's value: a tensor of its own, row *start* of a stacked output, or items *start:stop* of a packed
    one.

    :param host: as Python scalars or lists, when the host knows it. :param late: *base* on its way to the host.
    :ivar away: other ranks that hold *base*, as the worker keeps it (:mod:`mstar.worker.handles`). Where only they do,
        *base* is on the meta device: it has a shape and no contents.
    """

    __slots__ = ("away", "base", "host", "late", "row", "start", "stop")

    def __init__(
        self,
        base: Tensor,
        start: int = 0,
        stop: int = -1,
        row: bool = False,
        host: Any = None,
        late: Late | None = None,
    ):
        self.base, self.start, self.stop, self.row, self.host, self.late = base, start, stop, row, host, late
        self.away: Any = None

    @classmethod
    def whole(cls, tensor: Tensor, host: Any = None) -> Ref:
        return cls(tensor, 0, tensor.shape[0] if tensor.ndim else 1, host=host)

    @property
    def length(self) -> int:
        """Items along the first dimension; 1 for a row of a stacked output."""
        return 1 if self.row else self.stop - self.start

    def tensor(self) -> Tensor:
        if self.away is not None and self.base.is_meta:
            self.base = self.away.fetch()
        return self._of(self.base)

    def on_host(self) -> Tensor:
        """On the CPU; waits for the device."""
        if self.away is not None and self.base.is_meta:
            self.base = self.away.fetch()
        return self._of(self.base.cpu() if self.late is None else self.late.tensor())

    def _of(self, base: Tensor) -> Tensor:
        if self.row:
            return base[self.start]
        if self.start == 0 and (base.ndim == 0 or self.stop == base.shape[0]):
            return base
        return base[self.start : self.stop]

    def items(self) -> Tensor:
        """The value as items along a first dimension: a row of a stacked output is one item."""
        return self.base[self.start : self.start + 1] if self.row else self.tensor()

    def part(self, start: int, stop: int) -> Ref:
        """Items *start:stop* of a packed value."""
        if start == 0 and stop == self.length:
            return self
        host = None if self.host is None else self.host[start:stop]
        part = Ref(self.base, self.start + start, self.start + stop, host=host, late=self.late)
        part.away = self.away
        return part

    def to_host(self) -> Any:
        """As Python scalars or lists; waits for the device."""
        if self.host is None:
            if self.late is not None and self.row and self.base.ndim == 1:
                self.host = self.late.values()[self.start]
            else:
                self.host = self.on_host().tolist()
        return self.host


def torch_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """The dtype that a port's *name* stands for; ``model`` is that of the model."""
    return model if name == "model" else getattr(torch, name)


def as_tensor(array: Any, port: Port, device: torch.device, model: torch.dtype, name: str | None = None) -> Tensor:
    """A request's input as a tensor of *port*'s dtype on *device*. Shares memory with *array* where it can.

    Raises :class:`RequestError` for what is no array; *name* is what the client calls it, if not the port's name.
    """
    name = name or port.name
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{name!r} takes an array, got a {type(array).__name__}: {error}"
        raise RequestError(message, param=name) from None
    return to_device(tensor, device).to(torch_dtype(port.dtype, model))


def _runs(refs: Sequence[Ref]) -> list[Tensor]:
    """The refs' items as few tensors as possible: neighbours in one base become one slice."""
    pieces: list[Tensor] = []
    base, start, stop = refs[0].base, refs[0].start, refs[0].start
    for ref in refs:
        if ref.base is not base or ref.start != stop or not base.ndim:
            if stop > start:
                pieces.append(_slice(base, start, stop))
            base, start, stop = ref.base, ref.start, ref.start
        stop += 1 if ref.row else ref.stop - ref.start
    pieces.append(_slice(base, start, stop))
    return pieces


def _slice(base: Tensor, start: int, stop: int) -> Tensor:
    if base.ndim == 0:
        return base[None]
    return base if start == 0 and stop == base.shape[0] else base[start:stop]


def gather_packed(refs: Sequence[Ref]) -> Tensor:
    """``[sum(T), ...]``: the refs' items one after the other."""
    pieces = _runs(refs)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def gather_hosted(refs: Sequence[Ref], device: torch.device, stacked: bool = False) -> Tensor:
    """:func:`gather_packed`, or *stacked* :func:`gather_stacked`, on *device* of values in the host's memory: copied
    once on the way, into pinned memory."""
    if device.type != "cuda":
        return (gather_stacked(refs) if stacked else gather_packed(refs)).to(device)
    whole = stacked and not all(ref.row for ref in refs)  # each value is a row
    pieces = [ref.tensor()[None] for ref in refs] if whole else _runs(refs)
    length, inner = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1:]
    pinned = torch.empty((length, *inner), dtype=pieces[0].dtype, pin_memory=True)
    return torch.cat(pieces, out=pinned).to(device, non_blocking=True)


def gather_stacked(refs: Sequence[Ref]) -> Tensor:
    """``[rows, ...]``: all values have one shape."""
    if all(ref.row for ref in refs):
        pieces = _runs(refs)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return torch.stack([ref.tensor() for ref in refs])


def gather_list(refs: Sequence[Ref]) -> list[Tensor]:
    """Rows of a ``list`` port: each request's tensor by itself."""
    return [ref.tensor() for ref in refs]
