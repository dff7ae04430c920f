"""Bounded queues of one request: between partitions, from the client and to the client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mstar.graph.values import Ref
from mstar.spec.chunks import cut, wanted
from mstar.spec.errors import RequestError, not_finite
from mstar.spec.graph import CLIENT, Fresh, Stream, Whole

__all__ = ["Chunk", "Heard", "InnerStream", "OutStream", "fresh"]

Heard = Mapping[str, int]
"""Client stream → how many of its items went into something. Never changed, only replaced."""

_SENSED = ("audio", "image", "video", "action")
"""Modalities whose items somebody hears, sees or carries out: each of their numbers is one."""


@dataclass(slots=True)
class Chunk:
    """What one pull delivers: *left* items seen before, *new* ones, *ahead* ones that will come again, *pad* copies of
    the last unit of *unit* items. *offset*: items before it. *last*: nothing will follow. *at*: when it was pulled, in
    monotonic seconds."""

    ref: Ref
    left: int
    last: bool
    new: int = 0
    ahead: int = 0
    pad: int = 0
    offset: int = 0
    unit: int = 1
    at: float = 0.0


class InnerStream:
    """Items on their way to a partition, cut by the stream's chunk policy. Written by a partition or by the client.

    :ivar unit: items that are cut together.
    """

    __slots__ = (
        *("_began", "_context", "_first", "_items", "_left", "_marks", "_new", "_pulls", "_whole"),
        *("closed", "ended", "primed", "spec", "total", "unit"),
    )

    def __init__(self, spec: Stream):
        self.spec = spec
        chunk = spec.chunk
        self.unit = 1 if isinstance(chunk, Whole) else chunk.unit
        self._whole = self._complete(0)  # items of the next chunk, look-ahead included
        self._context = 0 if isinstance(chunk, Whole) else chunk.left * self.unit
        self.ended = False  # the writer will write no more
        self.closed = False  # the reader will read no more: writes vanish
        self.total = 0
        self.primed = 0  # items of context that came before the first one
        self._items: list[Tensor] = []  # [n, *item] pieces; the first self._left items are context
        self._left = 0
        self._new = 0
        self._pulls = 0
        self._began, self._first = 0.0, 0  # when the first items were written, and how many
        self._marks: deque[tuple[int, Heard]] = deque()  # (first item, what it was computed from), not delivered yet

    @property
    def pending(self) -> int:
        """Items written and not yet delivered."""
        return self._new

    @property
    def drained(self) -> bool:
        return self.ended and self._new == 0

    @property
    def full(self) -> bool:
        """Whether a writer must wait. Never for a reader that waits for the end: both would wait for ever."""
        return self._new >= self.spec.capacity and not self.closed and not isinstance(self.spec.chunk, Whole)

    @property
    def missing(self) -> int:
        """Items that the next chunk lacks, as long as the stream goes on."""
        return 0 if self._whole is None else max(0, self._whole - self._new)

    def pace(self, now: float) -> float | None:
        """Seconds an item that its writer has taken until *now*, on average since the first ones; ``None``: none came
        since. Of a stream that goes on."""
        since = self.total - self._first
        return (now - self._began) / since if since > 0 else None

    def _begin(self, items: int) -> None:
        """The first *items* have come."""
        self._began, self._first = time.monotonic(), items

    def write(self, items: Tensor, heard: Heard | None = None) -> None:
        """Append ``[n, *item shape]``. A writer checks :attr:`full` before it computes; one write may overshoot.

        :param heard: what the items were computed from; :meth:`heard` says so to their reader.
        :raises RequestError: a partition writes more than fits into a stream whose reader takes all of it at once.
        """
        if self.closed or not items.shape[0]:
            return
        spec = self.spec
        if isinstance(spec.chunk, Whole) and spec.source != CLIENT and self._new + items.shape[0] > spec.capacity:
            raise RequestError(
                f"stream {spec.name!r} is read as a whole and holds at most {spec.capacity} items; ask for a shorter "
                "answer",
                code="stream_too_long",
            )
        if heard:
            self._marks.append((self.total, heard))
        if not self.total:
            self._begin(items.shape[0])
        self._items.append(items)
        self._new += items.shape[0]
        self.total += items.shape[0]

    def write_from_client(self, items: Tensor) -> None:
        """As :meth:`write`, but a client that sends too much gets an error: nothing else can slow it down."""
        limit, count = self.spec.max_items, int(items.shape[0])
        name = self.spec.name
        if self.ended:
            raise RequestError(f"stream {name!r} has ended and takes no more items", param=name, code="stream_ended")
        if limit is not None and self.total + count > limit:
            raise RequestError(
                f"stream {name!r} takes at most {limit} items a request, got {self.total + count}",
                param=name,
                code="stream_too_long",
            )
        if limit is None and not self.closed and self._new + count > max(self.spec.capacity, count):
            raise RequestError(
                f"stream {name!r} holds {self._new} unread items and has room for {self.spec.capacity}; "
                "send more slowly",
                param=name,
                code="stream_overflow",
            )
        self.write(items)

    def prime(self, items: Tensor) -> None:
        """Begin with *items* ``[n, *item shape]`` as context that has been delivered already: whole units, of which the
        last ones are kept."""
        self.primed = items.shape[0]
        kept = min(self._context, self.primed - self.primed % self.unit)
        self._left = kept
        self._items = [items[self.primed - kept :]] if kept else []

    def end(self) -> None:
        """Nothing more will be written. What there is of a unit that is not whole is dropped."""
        self.ended = True
        rest = self._new % self.unit
        if rest:
            self._new, self.total = self._new - rest, self.total - rest

    def close(self) -> None:
        """The reader is gone."""
        self.closed = True
        self._items, self._left, self._new = [], 0, 0
        self._marks.clear()

    def _complete(self, pulls: int) -> int | None:
        chunk = self.spec.chunk
        return None if isinstance(chunk, Whole) else (wanted(chunk, pulls) + chunk.ahead) * chunk.unit

    def ready(self) -> bool:
        """Whether a whole chunk (or a short one, at the end) is there."""
        if self._whole is not None and self._new >= self._whole:
            return True
        return self.ended and self._new > 0

    def pull(self) -> Chunk:
        """The next chunk. Only when :meth:`ready`."""
        chunk, size, ahead = self.spec.chunk, self._new, 0
        if not isinstance(chunk, Whole):
            found = cut(chunk, self._pulls, self._new // self.unit, self.ended)
            assert found is not None
            size, ahead = found[0] * self.unit, found[1] * self.unit
        left, end = self._left, self._left + size
        offset = self.primed + self.total - self._new - left
        pad = self._padding(end + ahead)
        keep = min(end, self._context)
        ref = self._window(end + ahead, pad, end - keep)
        last = self.ended and size == self._new
        self._left, self._new = keep, self._new - size
        self._pulls += 1
        self._whole = self._complete(self._pulls)
        return Chunk(ref, left, last, size, ahead, pad, offset, self.unit, time.monotonic())

    def _padding(self, items: int) -> int:
        """Items that fill a chunk of *items* up."""
        chunk = self.spec.chunk
        if isinstance(chunk, Whole) or not chunk.padded:
            return 0
        return min((size * chunk.unit - items for size in chunk.padded if size * chunk.unit >= items), default=0)

    def _window(self, end: int, pad: int, drop: int) -> Ref:
        """The first *end* items that are held, with *pad* copies of the last unit; then forget the first *drop*."""
        items = self._items[0] if len(self._items) == 1 else torch.cat(self._items)
        rest = items[drop:]
        self._items = [_released(rest)] if rest.shape[0] else []
        if pad:
            unit = items[end - self.unit : end]
            items, end = torch.cat([items[:end], *[unit] * (pad // self.unit)]), end + pad
        return Ref(items, 0, end)

    def heard(self, before: Heard) -> Heard:
        """*before*, and what the items were computed from that have been delivered since this was asked last."""
        delivered = self.total - self._new
        if self.spec.source == CLIENT:
            return {**before, self.spec.name: delivered}
        marks = self._marks
        while marks and marks[0][0] < delivered:
            for stream, items in marks.popleft()[1].items():
                if items > before.get(stream, 0):
                    before = {**before, stream: items}
        return before

    def blank(self, length: int, device: torch.device, dtype: torch.dtype) -> Chunk:
        """A chunk of zeros, or of nothing, for a pull past the end."""
        shape = [d if isinstance(d, int) else 0 for d in self.spec.port.shape]
        ref = Ref.whole(torch.zeros((length, *shape), dtype=dtype, device=device))
        return Chunk(ref, 0, self.drained, at=time.monotonic())


def _released(rest: Tensor) -> Tensor:
    """*rest*, copied if it pins a buffer of more than twice its size: so that items are copied about once each, however
    many pulls take them."""
    return rest if 2 * rest.nbytes >= rest.untyped_storage().nbytes() else rest.clone()


def fresh(ref: Ref, rule: Fresh, chunk: Chunk, host: bool = True) -> tuple[Ref, int]:
    """What of a call's output belongs to the new items of the *chunk* that it was called with, and how many items of
    that are overlap.

    :param host: for somebody who wants it there; else it stays on the device.
    """
    items, new = ref.on_host() if host else ref.tensor(), chunk.new * rule.per_unit // chunk.unit
    behind = (chunk.ahead + chunk.pad) * rule.per_unit // chunk.unit
    end = new if rule.cut else items.shape[0] - behind
    start = end - new
    if start < 0 or end > items.shape[0]:
        raise ValueError(f"an output of {items.shape[0]} items is shorter than what belongs to its chunk's new items")
    overlap = min(rule.overlap, chunk.ahead * rule.per_unit // chunk.unit)
    return Ref.whole(items[start : end + overlap]), overlap


class OutStream:
    """The client's end: counts what was sent and what the client has taken. Who plays it begins with the first
    emission; where nothing is left to play, playback stands still and goes on with what comes next.

    :ivar played_until: when playback of what was sent runs out; ``None`` while nothing was sent.
    """

    __slots__ = ("credit", "items", "played_until", "seq", "spec")

    def __init__(self, spec: Stream):
        self.spec = spec
        self.credit = spec.capacity  # emissions that may still be sent before the client must acknowledge some
        self.seq = 0
        self.items = 0
        self.played_until: float | None = None

    @property
    def full(self) -> bool:
        return self.credit <= 0

    def sent(self, items: int, now: float) -> int:
        """Count one emission of *items* items and return its sequence number."""
        if self.spec.seconds_per_item is not None:
            begin = now if self.played_until is None else max(now, self.played_until)
            self.played_until = begin + items * self.spec.seconds_per_item
        seq = self.seq
        self.seq += 1
        self.credit -= 1
        self.items += items
        return seq

    def ack(self, emissions: int) -> None:
        self.credit = min(self.credit + emissions, self.spec.capacity)

    def payload(self, ref: Ref) -> tuple[Any, int]:
        """What travels to the client, and how many items it is: ints for tokens, else a numpy array of items.

        :raises RequestError: sound, pictures or actions are no numbers.
        """
        if self.spec.modality == "tokens":
            host = ref.to_host()
            tokens = host if isinstance(host, list) else [host]
            return tokens, len(tokens)
        array = ref.on_host().detach()
        if array.ndim == len(self.spec.port.shape):  # one item
            array = array[None]
        if array.dtype == torch.bfloat16:
            array = array.float()
        if self.spec.modality in _SENSED and array.is_floating_point() and not array.isfinite().all():
            raise not_finite()
        return array.numpy(), int(array.shape[0])
