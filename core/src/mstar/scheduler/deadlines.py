"""What is due first. No torch."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

__all__ = ["Deadlines"]


class Due(Protocol):
    """Something with a deadline in monotonic seconds, or ``None``. It is told apart by identity."""

    @property
    def deadline(self) -> float | None: ...
    def __hash__(self) -> int: ...


T = TypeVar("T", bound=Due)


class Deadlines(Generic[T]):
    """Things by deadline, earliest first; those without one are not kept. Removal is lazy, and stale entries outnumber
    live ones by a few at most: time and memory grow with what is in here, not with what ever was."""

    __slots__ = ("_count", "_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._live: dict[T, int] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._live)

    def add(self, item: T) -> None:
        """*item*'s deadline must not change while it is in here."""
        if item.deadline is None:
            return
        self._count += 1
        self._live[item] = self._count
        heapq.heappush(self._heap, (item.deadline, self._count, item))

    def discard(self, item: T) -> None:
        if self._live.pop(item, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 32:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        self.first()  # what is over is not kept alive by its place at the head

    def first(self) -> T | None:
        """The one with the earliest deadline, left in place."""
        while self._heap and self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
