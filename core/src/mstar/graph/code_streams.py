"""Streams of codes between a language model and a codec, on the host.

A token's id is known there anyway, since loops are judged by it. So which tokens are codes is decided without a step of
the device, and an item costs a few bytes instead of a slice of a tensor; a window goes to the device as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mstar.graph.streams import Heard, InnerStream
from mstar.graph.values import Ref, torch_dtype
from mstar.spec.graph import Stream

__all__ = ["CodeStream"]


class CodeStream(InnerStream):
    """See :class:`mstar.spec.graph.Codes`.

    :ivar token: the output port of the writer that tells which of its items are codes.
    """

    __slots__ = ("_codes", "_dtype", "_last", "_next", "_ranges", "token")

    def __init__(self, spec: Stream):
        super().__init__(spec)
        assert spec.codes is not None
        self._ranges, self.token = spec.codes.ranges, spec.codes.token
        self._dtype = torch_dtype(spec.port.dtype, torch.float32)
        self._last = len(self._ranges) - 1
        self._next = 0  # position of the code that comes next
        self._codes: list[Any] = []  # items as numbers or lists of them

    def write_code(self, token: int, item: Any, heard: Heard | None = None) -> bool:
        """Append *item* if *token* is the code that comes next; whether it is. :param item: a number, or nested lists
        of the item's shape."""
        place = self._next
        first, behind = self._ranges[place]
        if token < first or token >= behind or self.closed:
            return False
        self._next = place + 1 if place < self._last else 0
        if heard:
            self._marks.append((self.total, heard))
        if not self.total:
            self._begin(1)
        self._codes.append(item)
        self._new += 1
        self.total += 1
        return True

    def write(self, items: Tensor, heard: Heard | None = None) -> None:
        raise TypeError(f"stream {self.spec.name!r} takes codes one by one")

    def prime(self, items: Tensor) -> None:
        super().prime(items)
        self._codes, self._items = [code for kept in self._items for code in kept.tolist()], []

    def close(self) -> None:
        super().close()
        self._codes = []

    def _window(self, end: int, pad: int, drop: int) -> Ref:
        codes = self._codes[:end]
        if pad:
            codes += codes[-self.unit :] * (pad // self.unit)
        del self._codes[:drop]
        return Ref.whole(torch.tensor(codes, dtype=self._dtype), host=codes)
